// Vercel's AI SDK by its four providers. Its folder is in QHX_NODE_MODULES, the server in QHX_ADDRESS.
import assert from "node:assert";
import {createRequire} from "node:module";

const require = createRequire(`${process.env.QHX_NODE_MODULES}/`);
const {generateText, jsonSchema, Output, stepCountIs, streamText, tool} = require("ai");
const {createAnthropic} = require("@ai-sdk/anthropic");
const {createOpenAI} = require("@ai-sdk/openai");
const {createOpenAICompatible} = require("@ai-sdk/openai-compatible");

const baseURL = `${process.env.QHX_ADDRESS}/v1`;
const [question, text] = [process.env.QHX_QUESTION, process.env.QHX_ANSWER];
const openai = createOpenAI({baseURL, apiKey: "any"});
const anthropic = createAnthropic({baseURL, apiKey: "any"});
const transformRequestBody = body => body.tools ? {...body, parallel_tool_calls: false} : body;
const compatible = createOpenAICompatible({
  name: "qhx", baseURL, supportsStructuredOutputs: true, includeUsage: true, transformRequestBody,
});
// The tiny model would call the tool until its context is full.
const providerOptions = {openai: {parallelToolCalls: false}, anthropic: {disableParallelToolUse: true}};
const providers = {"chat/completions": openai.chat, responses: openai, messages: anthropic, compatible};
const schema = jsonSchema({
  type: "object", properties: {city: {type: "string", enum: ["Bonn"]}}, required: ["city"], additionalProperties: false,
});

for (const [name, provider] of Object.entries(providers)) {
  const settings = {temperature: 0, maxRetries: 0, maxOutputTokens: 60};

  const answer = await generateText({...settings, model: provider("language"), prompt: question});
  assert.deepStrictEqual([answer.text, answer.finishReason], [text, "stop"], name);
  const stream = streamText({...settings, model: provider("language"), prompt: question, onError: () => {}});
  assert.strictEqual(await stream.text, text, name);
  assert.ok((await stream.usage).outputTokens > 5, name);

  // The second step has the tool's result.
  let asked;
  const weather = tool({inputSchema: schema, execute: input => { asked = input; return "Sun."; }});
  const rounds = {
    ...settings, model: provider("calling"), prompt: "Rain?", tools: {weather}, toolChoice: "required", providerOptions,
    stopWhen: stepCountIs(2),
    prepareStep: ({stepNumber}) => stepNumber === 0 ? {} : {toolChoice: "none"},
  };
  const called = await generateText(rounds);
  assert.deepStrictEqual(asked, {city: "Bonn"}, name);
  assert.strictEqual(called.steps.length, 2, name);
  assert.strictEqual(called.steps[0].toolResults[0].output, "Sun.", name);
  const streamed = streamText({...rounds, onError: ({error}) => { throw error; }});
  assert.deepStrictEqual((await streamed.steps)[0].toolCalls[0].input, {city: "Bonn"}, name);

  const formed = await generateText({...settings, model: provider("calling"), prompt: "Where?", output: Output.object({schema})});
  assert.deepStrictEqual(formed.output, {city: "Bonn"}, name);
}
