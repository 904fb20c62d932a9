// Requests to this server, and its streams.

import {at} from "./dom.js";

export function headers() {
  const key = at("key").value;
  return {"content-type": "application/json", ...(key && {authorization: `Bearer ${key}`})};
}

/** The error of a response, in the words of the server. */
async function failure(response) {
  const body = await response.json().catch(() => null);
  if (response.status === 401) {
    document.dispatchEvent(new Event("key"));
    return new Error("The server asks for an API key: enter it in the settings.");
  }
  const error = body?.error;
  const known = typeof error === "string" ? error : error?.message;
  return Object.assign(new Error(known ?? `The server answered ${response.status}.`), {status: response.status});
}

/** Sends a request. `body` is an object, or a form. */
export async function call(path, {method = "GET", body, signal} = {}) {
  const form = body instanceof FormData;
  const {"content-type": json, ...plain} = headers();
  let response;
  try {
    response = await fetch(path, {
      method, signal, headers: form ? plain : {"content-type": json, ...plain},
      body: form || body === undefined ? body : JSON.stringify(body),
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The server does not answer. Is qhx serve still running?");
  }
  if (!response.ok) throw await failure(response);
  return response;
}

async function* pieces(response, end) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (let rest = "";;) {
      const {value, done} = await reader.read();
      if (done) return;
      const parts = (rest + value.replaceAll("\r", "")).split(end);
      rest = parts.pop();
      yield* parts;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Server-sent events of JSON. */
export async function* events(response) {
  for await (const block of pieces(response, "\n\n")) {
    const lines = block.split("\n").filter(line => line.startsWith("data:"));
    const data = lines.map(line => line.slice(5).trimStart()).join("\n");
    if (data && data !== "[DONE]") yield JSON.parse(data);
  }
}

/** Lines of JSON. */
export async function* lines(response) {
  for await (const line of pieces(response, "\n")) if (line) yield JSON.parse(line);
}
