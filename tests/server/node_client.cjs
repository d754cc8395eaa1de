// Asks a server with OpenAI's own client and prints what came as JSON.
// Arguments: the base URL, the body of a chat request as JSON.
"use strict";
const { OpenAI } = require("openai");

const [baseURL, text] = process.argv.slice(2);
const body = JSON.parse(text);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const schema = {
  type: "object",
  properties: { is_safe: { type: "boolean" } },
  required: ["is_safe"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "ask", parameters: schema } }];

async function ask(fields) {
  return client.chat.completions.create({ ...body, ...fields });
}

async function main() {
  const whole = (await ask({})).choices[0].message.content;
  let streamed = "", usage = null;
  for await (const chunk of await ask({ stream: true, stream_options: { include_usage: true } })) {
    streamed += chunk.choices[0]?.delta?.content ?? "";
    usage = chunk.usage ?? usage;
  }
  const logprobs = (await ask({ logprobs: true, top_logprobs: 2 })).choices[0].logprobs.content;
  const several = (await ask({ n: 3, temperature: 1, seed: 1 })).choices;
  const seeded = [];
  for (let i = 0; i < 2; i++) {
    seeded.push((await ask({ temperature: 1, seed: 2 })).choices[0].message.content);
  }
  const stop = [...whole].slice(-2).join("");
  const stopped = (await ask({ stop: [stop] })).choices[0].message.content;
  const structured = (await ask({
    max_tokens: 100,
    response_format: { type: "json_schema", json_schema: { name: "place", schema } },
  })).choices[0].message.content;
  const called = await ask({
    max_tokens: 200, tools, tool_choice: "required", parallel_tool_calls: false,
  });
  let fault = null;
  try {
    await ask({ temperature: 9 });
  } catch (problem) {
    fault = { status: problem.status, param: problem.param };
  }
  console.log(JSON.stringify({
    whole, streamed, usage, logprobs, seeded, stop, stopped, structured, fault,
    several: several.map((choice) => choice.message.content),
    call: called.choices[0].message.tool_calls[0].function,
  }));
}

main().catch((problem) => {
  console.error(problem);
  process.exit(1);
});
