"""SGLang's own HTTP API, as far as its front-end language needs it: `/generate` and what stands around it.

The names and meanings are those of SGLang 0.5 (`GenerateReqInput`, `SamplingParams`, `RuntimeEndpoint`).
"""

PATH = "/generate"
