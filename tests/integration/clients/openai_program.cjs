// The official JavaScript client against a running Baton, as its users write it:
// `CLIENTS_JS=FOLDER node openai_program.cjs URL MODEL [--exact]`. The folder is the one that has the client; what `--exact`
// means stands in server.py.
"use strict";
const assert = require("node:assert");
const { createRequire } = require("node:module");
const { OpenAI } = createRequire(`${process.env.CLIENTS_JS}/`)("openai");

const [url, model, ...more] = process.argv.slice(2);
const exact = more.includes("--exact");
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [
  { role: "system", content: "Be brief." },
  { role: "user", content: "What is a lighthouse?" },
];
const cities = ["Paris", "Rome"];
const days = [1, 2, 3];
const parameters = {
  type: "object",
  properties: { city: { enum: cities }, days: { enum: days } },
  required: ["city", "days"],
  additionalProperties: false,
};
const weather = { name: "weather", description: "A city.", parameters };
const tokens = 16;
const plain = { model, messages, temperature: 0, max_tokens: tokens, min_tokens: tokens };

// Says that it passed and how long it took, or that it did not.
async function check(what, ask) {
  const began = performance.now();
  let verdict = "FAILED";
  try {
    await ask();
    verdict = "ok";
  } finally {
    console.log(`${verdict.padEnd(6)} ${((performance.now() - began) / 1000).toFixed(1).padStart(5)} s  ${what}`);
  }
}

// However it is asked for, a text has the tokens that it was to have, and they are counted.
async function texts() {
  let text;
  const same = (other) => !exact || assert.equal(other, text);
  await check("a text in one piece", async () => {
    const whole = await client.chat.completions.create(plain);
    text = whole.choices[0].message.content;
    assert.equal(whole.choices[0].finish_reason, "length");
    assert.equal(whole.usage.completion_tokens, tokens);
  });
  await check("a text streamed", async () => {
    const pieces = [];
    const finishes = [];
    let usage = null;
    const asked = { ...plain, stream: true, stream_options: { include_usage: true } };
    for await (const chunk of await client.chat.completions.create(asked)) {
      pieces.push(chunk.choices[0]?.delta?.content ?? "");
      finishes.push(chunk.choices[0]?.finish_reason ?? null);
      usage = chunk.usage ?? usage;
    }
    same(pieces.join(""));
    assert.deepEqual(finishes.filter((one) => one !== null), ["length"]);
    assert.equal(usage.completion_tokens, tokens);
  });
  await check("a text by the client's own helper for streams", async () => {
    const helped = client.chat.completions.stream(plain);
    const pieces = [];
    helped.on("content", (piece) => pieces.push(piece));
    assert.equal(await helped.finalContent(), pieces.join(""));
    same(pieces.join(""));
  });
  await check("the head of an answer", async () => {
    const raw = await client.chat.completions.create(plain).withResponse();
    assert.ok(raw.response.headers.get("x-request-id"));
    same(raw.data.choices[0].message.content);
  });
  await check("a completion with two choices", async () => {
    const completed = await client.completions.create({ model, prompt: "Once", max_tokens: 4, n: 2, seed: 1 });
    assert.deepEqual(completed.choices.map((choice) => choice.index), [0, 1]);
  });
  await check("the model is listed", async () => {
    const names = [];
    for await (const one of client.models.list()) names.push(one.id);
    assert.ok(names.includes(model), names);
  });
}

// JSON as `parameters` describes it.
function asAsked(text) {
  const found = JSON.parse(text);
  assert.deepEqual(Object.keys(found).sort(), ["city", "days"]);
  assert.ok(cities.includes(found.city) && days.includes(found.days), text);
  return found;
}

// A call, streamed and run by the client's own helper; a schema.
async function calls() {
  const asked = { model, messages, temperature: 0, max_tokens: 128 };
  const tools = [{ type: "function", function: weather }];
  const named = { ...asked, tools, tool_choice: { type: "function", function: { name: "weather" } } };
  let whole;
  const same = (other) => !exact || assert.deepEqual(other, whole);
  await check("a named tool is called", async () => {
    const answer = await client.chat.completions.create(named);
    const call = answer.choices[0].message.tool_calls[0].function;
    assert.equal(call.name, "weather");
    whole = asAsked(call.arguments);
  });
  await check("the same, streamed", async () => {
    const streamed = await client.chat.completions.stream(named).finalMessage();
    assert.equal(streamed.tool_calls[0].function.name, "weather");
    same(asAsked(streamed.tool_calls[0].function.arguments));
  });
  await check("the client's own helper runs the tool", async () => {
    const given = [];
    const tool = { ...weather, parse: asAsked, function: (call) => { given.push(call); return "sun"; } };
    await client.chat.completions.runTools({ ...named, tools: [{ type: "function", function: tool }] }).done();
    assert.equal(given.length, 1);
    same(given[0]);
  });
  await check("a schema", async () => {
    const format = { type: "json_schema", json_schema: { name: "report", strict: true, schema: parameters } };
    const report = await client.chat.completions.create({ ...asked, response_format: format });
    asAsked(report.choices[0].message.content);
  });
}

// What is refused comes as the client's own classes; a stream that is left is ended.
async function errors() {
  const context = (await client.models.retrieve(model)).max_model_len;
  await check("another model is refused", async () => {
    await assert.rejects(client.chat.completions.create({ ...plain, model: `not-${model}` }), (error) => {
      return error instanceof OpenAI.NotFoundError && error.code === "model_not_found" && error.param === "model";
    });
  });
  await check("a prompt over the context is refused, also to a stream", async () => {
    const long = [{ role: "user", content: "word ".repeat(context) }]; // a word is a token at least
    await assert.rejects(client.chat.completions.create({ ...plain, messages: long, stream: true }), (error) => {
      return error instanceof OpenAI.BadRequestError && error.code === "context_length_exceeded";
    });
  });
  await check("a stream is left", async () => {
    const budget = Math.min(1000, context >> 1);
    const asked = { ...plain, max_tokens: budget, min_tokens: budget, stream: true };
    const stream = await client.chat.completions.create(asked);
    for await (const chunk of stream) {
      if (chunk.choices[0].delta.content) break;
    }
    assert.ok(stream.controller.signal.aborted);
  });
}

texts().then(calls).then(errors).catch((error) => {
  console.error(error);
  process.exit(1);
});
