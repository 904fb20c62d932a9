// The whole round of OpenAI's client for JavaScript. Its folder is in QHX_NODE_MODULES, the server in QHX_ADDRESS.
const assert = require("node:assert");
const OpenAI = require(`${process.env.QHX_NODE_MODULES}/openai`);

async function main() {
  const client = new OpenAI({baseURL: `${process.env.QHX_ADDRESS}/v1`, apiKey: "any", maxRetries: 0});
  const [question, text] = [process.env.QHX_QUESTION, process.env.QHX_ANSWER];
  const ask = {model: "language", messages: [{role: "user", content: question}], temperature: 0};

  const answer = await client.chat.completions.create(ask);
  assert.strictEqual(answer.choices[0].message.content, text);

  let streamed = "";
  for await (const chunk of await client.chat.completions.create({...ask, stream: true})) {
    streamed += chunk.choices[0]?.delta?.content ?? "";
  }
  assert.strictEqual(streamed, text);

  const schema = {type: "object", properties: {city: {enum: ["Bonn"]}}, required: ["city"], additionalProperties: false};
  const format = {type: "json_schema", json_schema: {name: "city", schema, strict: true}};
  const formed = await client.chat.completions.create({...ask, response_format: format});
  assert.deepStrictEqual(JSON.parse(formed.choices[0].message.content), {city: "Bonn"});

  const response = await client.responses.create({model: "language", input: question, temperature: 0});
  assert.strictEqual(response.output_text, text);

  const vectors = await client.embeddings.create({model: "encoder", input: ["SELECT 1", "def f(): pass"]});
  assert.strictEqual(vectors.data.length, 2);
  assert.ok(Math.abs(vectors.data[0].embedding.reduce((sum, value) => sum + value * value, 0) - 1) < 1e-4);

  // What is broken off is over for the server, too.
  const stream = await client.chat.completions.create({...ask, stream: true});
  for await (const chunk of stream) {
    if (chunk.choices[0]?.delta?.content) stream.controller.abort();
  }

  await assert.rejects(client.chat.completions.create({...ask, model: "nothing"}), error => {
    assert.strictEqual(error.status, 404);
    assert.strictEqual(error.code, "model_not_found");
    return true;
  });
}

main();
