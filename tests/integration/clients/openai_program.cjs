// The official JavaScript client against a running Baton, as its users write it: `node openai_program.cjs URL MODEL`.
"use strict";
const assert = require("node:assert");
const { createRequire } = require("node:module");
const { OpenAI } = createRequire(`${process.env.CLIENTS_JS}/`)("openai");

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [
  { role: "system", content: "Be brief." },
  { role: "user", content: "What is a lighthouse?" },
];
const parameters = {
  type: "object",
  properties: { city: { enum: ["Paris", "Rome"] }, days: { enum: [1, 2, 3] } },
  required: ["city", "days"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "weather", description: "A city.", parameters } }];
const plain = { model, messages, temperature: 0, max_tokens: 16, ignore_eos: true };

// In one piece, streamed by hand and by the client's own helper it is the same text, and it is counted.
async function texts() {
  const whole = await client.chat.completions.create(plain);
  assert.equal(whole.usage.completion_tokens, 16);
  const pieces = [];
  let usage = null;
  const stream = await client.chat.completions.create({
    ...plain, stream: true, stream_options: { include_usage: true },
  });
  for await (const chunk of stream) {
    pieces.push(chunk.choices[0]?.delta?.content ?? "");
    usage = chunk.usage ?? usage;
  }
  assert.equal(pieces.join(""), whole.choices[0].message.content);
  assert.equal(usage.completion_tokens, 16);
  const helped = client.chat.completions.stream(plain);
  assert.equal(await helped.finalContent(), whole.choices[0].message.content);
  const raw = await client.chat.completions.create(plain).withResponse();
  assert.ok(raw.response.headers.get("x-request-id"));
  const completed = await client.completions.create({ model, prompt: "Once", max_tokens: 4, n: 2, seed: 1 });
  assert.deepEqual(completed.choices.map((choice) => choice.index), [0, 1]);
  const names = [];
  for await (const one of client.models.list()) names.push(one.id);
  assert.deepEqual(names, [model]);
}

// A call, streamed and run by the client's own helper; a schema.
async function calls() {
  const asked = { model, messages, temperature: 0, max_tokens: 128 };
  const choice = { type: "function", function: { name: "weather" } };
  const whole = await client.chat.completions.create({ ...asked, tools, tool_choice: choice });
  const call = whole.choices[0].message.tool_calls[0].function;
  assert.equal(call.name, "weather");
  assert.deepEqual(Object.keys(JSON.parse(call.arguments)).sort(), ["city", "days"]);
  const streamed = await client.chat.completions.stream({ ...asked, tools, tool_choice: choice }).finalMessage();
  assert.equal(streamed.tool_calls[0].function.arguments, call.arguments);
  let ran = null;
  const runner = client.chat.completions.runTools({
    ...asked,
    tool_choice: choice,
    tools: [{
      type: "function",
      function: { ...tools[0].function, parse: JSON.parse, function: (given) => { ran = given; return "sun"; } },
    }],
  });
  await runner.done();
  assert.deepEqual(ran, JSON.parse(call.arguments));
  const format = { type: "json_schema", json_schema: { name: "report", strict: true, schema: parameters } };
  const report = await client.chat.completions.create({ ...asked, response_format: format });
  assert.deepEqual(Object.keys(JSON.parse(report.choices[0].message.content)).sort(), ["city", "days"]);
}

// What is refused comes as the client's own classes; a stream that is left is ended.
async function errors() {
  await assert.rejects(client.chat.completions.create({ ...plain, model: "another" }), (error) => {
    return error instanceof OpenAI.NotFoundError && error.code === "model_not_found" && error.param === "model";
  });
  const long = [{ role: "user", content: "word ".repeat(2000) }];
  await assert.rejects(client.chat.completions.create({ ...plain, messages: long, stream: true }), (error) => {
    return error instanceof OpenAI.BadRequestError && error.code === "context_length_exceeded";
  });
  const stream = await client.chat.completions.create({ ...plain, max_tokens: 1000, stream: true });
  for await (const chunk of stream) {
    if (chunk.choices[0].delta.content) break;
  }
}

texts().then(calls).then(errors).catch((error) => {
  console.error(error);
  process.exit(1);
});
