// Asks by the clients of OpenAI and Anthropic for Node: [kind, body] from stdin, what was said to stdout.
import OpenAI from "openai";
import Anthropic from "@anthropic-ai/sdk";

const url = process.argv[2];
const openai = new OpenAI({ baseURL: url + "/v1", apiKey: "none", maxRetries: 0 });
const anthropic = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });

async function choices(create, body) {
  const answer = await create(body);
  if (!body.stream) return answer.choices;
  const parts = [];
  for await (const chunk of answer) parts.push(...chunk.choices);
  return parts;
}

const ask = {
  text: (body) => choices((it) => openai.completions.create(it), body),
  chat: (body) => choices((it) => openai.chat.completions.create(it), body),
  async responses({ stream, ...body }) {
    if (!stream) return openai.responses.create(body);
    const events = openai.responses.stream(body);
    let streamed = "";
    events.on("response.output_text.delta", (event) => (streamed += event.delta));
    const answer = await events.finalResponse();
    return { ...answer, streamed };
  },
  async messages({ stream, ...body }) {
    if (!stream) return anthropic.messages.create(body);
    let streamed = "";
    const events = anthropic.messages.stream(body).on("text", (delta) => (streamed += delta));
    return { ...(await events.finalMessage()), streamed };
  },
};

let asked = "";
for await (const part of process.stdin) asked += part;
const answers = [];
for (const [kind, body] of JSON.parse(asked)) answers.push(await ask[kind](body));
const refused = await Promise.all([
  openai.completions.create({ model: "tiny", prompt: "a", best_of: 2 }).catch((error) => error),
  anthropic.messages.create({ model: "other", max_tokens: 1, messages: [] }).catch((error) => error),
]);
console.log(JSON.stringify({ answers, refused: refused.map((it) => [it.constructor.name, it.status, it.param]) }));
