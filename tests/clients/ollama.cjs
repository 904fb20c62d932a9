// The round of Ollama's client for JavaScript. Its folder is in QHX_NODE_MODULES, the server in QHX_ADDRESS.
const assert = require("node:assert");
const {Ollama} = require(`${process.env.QHX_NODE_MODULES}/ollama`);

async function main() {
  const client = new Ollama({host: process.env.QHX_ADDRESS});
  const [question, text] = [process.env.QHX_QUESTION, process.env.QHX_ANSWER];
  const ask = {model: "language", messages: [{role: "user", content: question}], options: {temperature: 0}};

  const answer = await client.chat(ask);
  assert.strictEqual(answer.message.content, text);

  let streamed = "";
  for await (const part of await client.chat({...ask, stream: true})) streamed += part.message.content;
  assert.strictEqual(streamed, text);

  const vectors = await client.embed({model: "encoder", input: ["SELECT 1", "def f(): pass"]});
  assert.strictEqual(vectors.embeddings.length, 2);
  assert.strictEqual((await client.list()).models[0].name, "language");
  await assert.rejects(client.chat({...ask, model: "nothing"}), /nothing/);
}

main();
