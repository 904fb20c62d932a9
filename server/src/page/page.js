"use strict";
const at = id => document.getElementById(id);
const make = (tag, text, kind) => {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (kind) element.className = kind;
  return element;
};
const FIELDS = ["system", "temperature", "top_p", "top_k", "max_tokens", "seed", "thinking", "schema"];
let models = [], turns = [], attached = [], running = null, recorder = null;

function say(text) { at("status").textContent = text; }
function complain(text) {
  at("error").textContent = text ?? "";
  at("error").hidden = !text;
}
function headers() {
  const key = at("key").value;
  return {"content-type": "application/json", ...(key && {authorization: `Bearer ${key}`})};
}
async function failure(response) {
  const body = await response.json().catch(() => null);
  if (response.status === 401) at("settings").open = true;
  return new Error(body?.error?.message ?? `The server answered ${response.status}.`);
}

async function load() {
  const response = await fetch("v1/models", {headers: headers()});
  if (!response.ok) throw await failure(response);
  const chosen = at("model").value || localStorage.getItem("qhx.model");
  models = (await response.json()).data;
  const able = models.filter(model => !model.abilities || model.abilities.includes("generate"));
  at("model").replaceChildren(...able.map(model => new Option(model.id, model.id)));
  if (able.some(model => model.id === chosen)) at("model").value = chosen;
  if (!able.length) complain("No model here generates text.");
  describe();
}
function current() { return models.find(model => model.id === at("model").value); }
function describe() {
  const model = current(), inputs = model?.modalities ?? [];
  const parts = [];
  if (model?.backend) parts.push(`on ${model.backend}`);
  if (model?.max_model_len) parts.push(`context of ${model.max_model_len} tokens`);
  if (model && !model.backend) parts.push("not loaded yet");
  at("about").textContent = parts.join(", ");
  const takes = kind => model && (!model.modalities || inputs.includes(kind));
  const kinds = ["image", "audio"].filter(takes);
  at("attach").hidden = !kinds.length;
  at("file").accept = kinds.map(kind => `${kind}/*`).join(",");
  at("record").hidden = !takes("audio") || !navigator.mediaDevices;
}

function show(element, text) {
  // What stands between fences is code; an open fence goes on to the end.
  const parts = text.split(/^```[^\n]*\n?/m);
  element.replaceChildren(...parts.map((part, index) => {
    if (index % 2 === 0) return make("span", part);
    const code = make("pre");
    code.append(make("code", part));
    code.tabIndex = 0;
    return code;
  }));
}
function near() {
  const log = at("log");
  return log.scrollHeight - log.scrollTop - log.clientHeight < 80;
}
function bottom() { at("log").scrollTop = at("log").scrollHeight; }

function article(role, name) {
  const card = make("article", undefined, role);
  card.append(make("h2", name));
  at("log").append(card);
  return card;
}
function showUser(text, files) {
  const card = article("user", "You");
  for (const file of files) {
    const element = make(file.kind === "image" ? "img" : "audio");
    element.src = file.url;
    if (file.kind === "image") { element.alt = file.name; element.className = "thumb"; }
    else { element.controls = true; element.setAttribute("aria-label", file.name); }
    card.append(element);
  }
  card.append(make("div", text, "words"));
  bottom();
}

function request() {
  const number = name => at(name).value === "" ? undefined : Number(at(name).value);
  const system = at("system").value.trim(), schema = at("schema").value.trim();
  const messages = turns.map(({role, content}) => ({role, content}));
  if (system) messages.unshift({role: "system", content: system});
  const body = {
    model: at("model").value, messages, stream: true, stream_options: {include_usage: true},
    temperature: number("temperature"), top_p: number("top_p"), top_k: number("top_k"),
    max_tokens: number("max_tokens"), seed: number("seed"),
  };
  if (at("thinking").value) body.chat_template_kwargs = {enable_thinking: at("thinking").value === "on"};
  if (schema) {
    let read;
    try { read = JSON.parse(schema); }
    catch (error) { throw new Error(`The JSON schema cannot be read: ${error.message}`); }
    body.response_format = {type: "json_schema", json_schema: {name: "answer", schema: read}};
  }
  return body;
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = "";;) {
    const {value, done} = await reader.read();
    if (done) return;
    const blocks = (rest + value.replaceAll("\r", "")).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const lines = block.split("\n").filter(line => line.startsWith("data:"));
      const data = lines.map(line => line.slice(5).trimStart()).join("\n");
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

async function answer() {
  complain();
  let body;
  try { body = request(); } catch (error) { at("settings").open = true; return complain(error.message); }
  running = new AbortController();
  busy(true);
  say("Answering.");
  const card = article("assistant", at("model").value);
  const thoughts = make("details"), thought = make("div", "", "words"), words = make("div", "", "words");
  thoughts.append(make("summary", "Reasoning"), thought);
  thoughts.hidden = true;
  const foot = make("footer", "Reading the prompt …");
  card.append(thoughts, words, foot);
  bottom();
  const start = performance.now();
  let text = "", reasoning = "", first, last, usage, ended, failed;
  try {
    const response = await fetch("v1/chat/completions",
      {method: "POST", headers: headers(), body: JSON.stringify(body), signal: running.signal});
    if (!response.ok) throw await failure(response);
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage ?? usage;
      const choice = event.choices?.[0];
      if (!choice) continue;
      ended = choice.finish_reason ?? ended;
      const {content, reasoning_content: thinks} = choice.delta ?? {};
      if (!content && !thinks) continue;
      last = performance.now();
      first ??= last;
      const follow = near();
      if (thinks) { reasoning += thinks; thoughts.hidden = false; thought.textContent = reasoning; }
      if (content) { text += content; show(words, text); }
      foot.textContent = "Answering …";
      if (follow) bottom();
    }
  } catch (error) {
    failed = error;
  }
  const stopped = failed?.name === "AbortError";
  foot.textContent = [...summary(start, first, last, usage), ...(stopped ? ["stopped"] : []),
    ...(ended === "length" ? ["cut at the longest answer"] : [])].join(", ");
  if (failed && !stopped) complain(failed.message);
  if (text || reasoning) turns.push({role: "assistant", content: text, card}); else card.remove();
  say(failed && !stopped ? "" : `Answer: ${text}`);
  running = null;
  busy(false);
  load().catch(() => {});
}
function summary(start, first, last, usage) {
  const parts = [];
  if (first !== undefined) parts.push(`first text after ${((first - start) / 1000).toFixed(2)} s`);
  if (usage) {
    const count = usage.completion_tokens, seconds = (last - first) / 1000;
    parts.push(`${count} tokens`);
    if (count > 1 && seconds > 0) parts.push(`${((count - 1) / seconds).toFixed(1)} tokens a second`);
    const reused = usage.prompt_tokens_details?.cached_tokens ?? 0;
    parts.push(`prompt of ${usage.prompt_tokens} tokens, ${reused} of them reused`);
  }
  return parts;
}
function busy(on) {
  at("stop").hidden = !on;
  at("send").disabled = on;
  at("again").disabled = on || !turns.some(turn => turn.role === "user");
  at("ask").focus();
}

async function send() {
  const text = at("ask").value.trim(), files = attached;
  if (running || (!text && !files.length)) return;
  const parts = files.map(file => file.part);
  const content = parts.length ? [...parts, ...(text ? [{type: "text", text}] : [])] : text;
  attached = [];
  list();
  at("ask").value = "";
  showUser(text, files);
  turns.push({role: "user", content});
  await answer();
}
async function again() {
  if (running) return;
  while (turns.at(-1)?.role === "assistant") turns.pop().card.remove();
  if (turns.length) await answer();
}
function fresh() {
  running?.abort();
  turns = [];
  attached = [];
  at("log").replaceChildren();
  list();
  complain();
  busy(false);
  say("A new chat.");
}

function list() {
  at("attached").replaceChildren(...attached.map(file => {
    const item = make("li", `${file.name} `), remove = make("button", "×");
    remove.type = "button";
    remove.setAttribute("aria-label", `Remove ${file.name}`);
    remove.onclick = () => { attached = attached.filter(other => other !== file); list(); at("ask").focus(); };
    item.append(remove);
    return item;
  }));
}
const dataUrl = blob => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result);
  reader.onerror = () => reject(reader.error);
  reader.readAsDataURL(blob);
});
async function take(files) {
  for (const file of files) {
    try {
      if (file.type.startsWith("image/")) {
        const url = await dataUrl(file);
        attached.push({kind: "image", name: file.name || "image", url, part: {type: "image_url", image_url: {url}}});
      } else if (file.type.startsWith("audio/")) {
        await hear(file, file.name);
      } else {
        complain(`${file.name} is neither an image nor audio.`);
      }
    } catch (error) {
      complain(`${file.name} cannot be read: ${error.message}`);
    }
  }
  list();
}

/** Takes audio of any kind that the browser decodes, as a WAV file of one channel. */
async function hear(blob, name) {
  const RATE = 16000;
  const decoder = new AudioContext();
  const heard = await decoder.decodeAudioData(await blob.arrayBuffer());
  await decoder.close();
  const offline = new OfflineAudioContext(1, Math.max(1, Math.ceil(heard.duration * RATE)), RATE);
  const source = offline.createBufferSource();
  source.buffer = heard;
  source.connect(offline.destination);
  source.start();
  const samples = (await offline.startRendering()).getChannelData(0);
  const view = new DataView(new ArrayBuffer(44 + samples.length * 2));
  const word = (offset, text) => [...text].forEach((c, i) => view.setUint8(offset + i, c.charCodeAt(0)));
  word(0, "RIFF"); view.setUint32(4, 36 + samples.length * 2, true); word(8, "WAVEfmt ");
  view.setUint32(16, 16, true); view.setUint16(20, 1, true); view.setUint16(22, 1, true);
  view.setUint32(24, RATE, true); view.setUint32(28, RATE * 2, true); view.setUint16(32, 2, true);
  view.setUint16(34, 16, true); word(36, "data"); view.setUint32(40, samples.length * 2, true);
  samples.forEach((value, i) => view.setInt16(44 + i * 2, Math.max(-1, Math.min(1, value)) * 32767, true));
  const url = await dataUrl(new Blob([view.buffer], {type: "audio/wav"}));
  const data = url.slice(url.indexOf(",") + 1);
  attached.push({kind: "audio", name, url, part: {type: "input_audio", input_audio: {data, format: "wav"}}});
}
async function record() {
  if (recorder) return recorder.stop();
  try {
    const stream = await navigator.mediaDevices.getUserMedia({audio: true});
    const pieces = [];
    recorder = new MediaRecorder(stream);
    recorder.ondataavailable = event => pieces.push(event.data);
    recorder.onstop = async () => {
      stream.getTracks().forEach(track => track.stop());
      const type = recorder.mimeType;
      recorder = null;
      recording(false);
      try { await hear(new Blob(pieces, {type}), "Recording"); list(); say("Recorded."); }
      catch (error) { complain(`The recording cannot be read: ${error.message}`); }
    };
    recorder.start();
    recording(true);
  } catch (error) {
    complain(`The microphone cannot be used: ${error.message}`);
  }
}
function recording(on) {
  at("record").setAttribute("aria-pressed", on);
  at("record").textContent = on ? "End the recording" : "Record";
}

for (const id of FIELDS) {
  at(id).value = localStorage.getItem(`qhx.${id}`) ?? "";
  at(id).onchange = () => localStorage.setItem(`qhx.${id}`, at(id).value);
}
at("model").onchange = () => { localStorage.setItem("qhx.model", at("model").value); describe(); };
at("key").onchange = () => load().then(() => complain(), error => complain(error.message));
at("composer").onsubmit = event => { event.preventDefault(); send(); };
at("ask").onkeydown = event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
};
at("ask").onpaste = event => {
  if (event.clipboardData.files.length) { event.preventDefault(); take(event.clipboardData.files); }
};
document.ondragover = event => event.preventDefault();
document.ondrop = event => { event.preventDefault(); take(event.dataTransfer.files); };
document.onkeydown = event => { if (event.key === "Escape") running?.abort(); };
at("attach").onclick = () => at("file").click();
at("file").onchange = async () => { await take(at("file").files); at("file").value = ""; };
at("record").onclick = record;
at("stop").onclick = () => running?.abort();
at("again").onclick = again;
at("fresh").onclick = fresh;
load().catch(error => complain(error.message));
