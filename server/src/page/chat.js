// Conversations with a model.

import {call, events} from "./api.js";
import {at, button, complain, copy, decide, download, make, recall, remember, say} from "./dom.js";
import {show} from "./markdown.js";
import {part, read, record, recording, speak, transcribe} from "./media.js";
import {forget, keep, open as openStore} from "./store.js";

/** Characters of a title that a first message gives. */
const TITLE = 60;

/** Conversations that are kept, the newest first; the one that is shown; models; files of the next message. */
let kept = [], current = begin(), models = [], attached = [];
/** Set while the last message is edited. */
let editing = false;
/** The answer under way: `{controller, conversation, turn, card}`. */
let running = null;

function begin() {
  const id = crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`;
  return {id, title: "", created: Date.now(), updated: Date.now(), turns: []};
}

const title = conversation => conversation.title || "New chat";
const able = ability => models.filter(model => model.abilities.includes(ability));
const chosen = () => models.find(model => model.id === at("model").value);

/** Takes the models that are served. */
export function serve(served) {
  const before = at("model").value || recall("model");
  models = served;
  const names = able("generate").map(model => model.id);
  at("model").replaceChildren(...names.map(name => new Option(name, name)));
  if (names.includes(before)) at("model").value = before;
  at("model").disabled = !names.length;
  const voices = able("speak")[0]?.voices ?? [], voice = at("voice").value || recall("voice");
  at("voices").hidden = !voices.length;
  at("voice").replaceChildren(...voices.map(name => new Option(name, name)));
  if (voices.includes(voice)) at("voice").value = voice;
  describe();
  if (!current.turns.length) draw(); else tools();
}

/** Chooses a model. */
export function choose(name) {
  at("model").value = name;
  remember("model", name);
  describe();
}

function describe() {
  const model = chosen(), parts = [];
  if (model?.backend) parts.push(`on ${model.backend}`);
  if (model?.max_model_len) parts.push(`context of ${model.max_model_len} tokens`);
  if (model && !model.loaded) parts.push("not loaded yet");
  at("about").textContent = parts.join(", ");
  const takes = kind => model?.modalities.includes(kind);
  const kinds = ["image", "audio"].filter(takes);
  at("attach").hidden = !kinds.length;
  at("file").accept = kinds.map(kind => `${kind}/*`).join(",");
  at("record").hidden = !takes("audio") || !navigator.mediaDevices;
  at("dictate").hidden = !able("transcribe").length || !navigator.mediaDevices;
  at("send").disabled = !model || running;
}

// The list of conversations.

async function save(conversation) {
  if (!kept.includes(conversation) && conversation !== current) return;
  conversation.updated = Date.now();
  kept = [conversation, ...kept.filter(other => other !== conversation)];
  enumerate();
  try { await keep(conversation); } catch (error) { complain(error.message); }
}

function enumerate() {
  const focused = document.activeElement?.closest("#list button");
  const mark = focused && [focused.closest("li").dataset.id, focused.className];
  at("list").replaceChildren(...kept.map(conversation => {
    const name = title(conversation), open = button(name, () => select(conversation), {className: "open"});
    if (conversation === current) open.setAttribute("aria-current", "true");
    const more = button("⋯", () => manage(conversation),
      {className: "more", "aria-label": `Rename, export or delete: ${name}`, "aria-haspopup": "dialog"});
    const item = make("li", {}, open, more);
    item.dataset.id = conversation.id;
    return item;
  }));
  if (mark) [...at("list").children].find(item => item.dataset.id === mark[0])?.querySelector(`.${mark[1]}`)?.focus();
  at("no-chats").hidden = kept.length > 0;
  at("title").textContent = title(current);
}

function select(conversation) {
  current = conversation;
  leave();
  const model = models.find(model => model.id === conversation.model);
  if (model) choose(model.id);
  enumerate();
  draw();
  location.hash = "#chat";
  say(`Chat: ${title(conversation)}`);
}

function fresh() {
  current = begin();
  attached = [];
  leave();
  list();
  complain();
  enumerate();
  draw();
  location.hash = "#chat";
  at("ask").focus();
  say("A new chat.");
}

let managed = null;
function manage(conversation) {
  managed = conversation;
  at("name").value = title(conversation);
  at("entry").showModal();
  at("name").select();
}
async function rename() {
  const name = at("name").value.trim();
  if (!managed || !name || name === title(managed)) return;
  managed.title = name;
  await save(managed);
}
function exported() {
  const {title: name, model, created, updated} = managed;
  const date = time => new Date(time).toISOString();
  const json = {title: name, model, created: date(created), updated: date(updated), messages: messages(managed)};
  const file = title(managed).replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "") || "chat";
  download(`${file}.json`, new Blob([JSON.stringify(json, null, 2)], {type: "application/json"}));
}
async function remove() {
  const gone = managed;
  at("entry").close();
  if (!await decide(`Delete the chat “${title(gone)}”? It cannot be brought back.`, "Delete")) return;
  if (running?.conversation === gone) running.controller.abort();
  kept = kept.filter(other => other !== gone);
  await forget(gone.id).catch(error => complain(`The chat is not deleted: ${error.message}`));
  if (gone === current) { current = begin(); leave(); draw(); }
  enumerate();
  say("The chat is deleted.");
  at("fresh").focus();
}

// The messages of the one that is shown.

function draw() {
  const cards = current.turns.filter(turn => turn.role !== "tool").map(card);
  at("log").replaceChildren(...cards, ...(cards.length ? [] : [empty()]));
  tools();
  bottom();
}

function empty() {
  if (able("generate").length) {
    const takes = at("attach").hidden ? "" : ` ${at("model").value} takes ${at("file").accept.replaceAll("/*", "s")
      .replace(",", " and ").replace("audios", "audio")} too: attach, paste or drop them.`;
    return make("div", {className: "empty"}, make("p", {}, "Write a message to begin."),
      make("p", {className: "faint"}, `The conversation stays in this browser.${takes}`));
  }
  return make("div", {className: "empty"}, make("p", {}, "There is no model to chat with yet."),
    make("p", {}, make("a", {href: "#models"}, "Choose a model")));
}

function card(turn) {
  const who = turn.role === "user" ? "You" : turn.model ?? "Answer";
  const words = make("div", {className: "words"}), foot = make("footer", {});
  const element = make("article", {className: turn.role}, make("h3", {}, who));
  for (const file of turn.files ?? []) {
    element.append(file.kind === "image" ? make("img", {src: file.url, alt: file.name, className: "thumb"})
      : make("audio", {src: file.url, controls: true, "aria-label": file.name}));
  }
  const thought = make("div", {className: "words"}), calls = make("div", {className: "calls"});
  const thoughts = make("details", {}, make("summary", {}, "Reasoning"), thought);
  element.append(thoughts, words, calls, foot);
  Object.assign(element, {turn, words, thoughts, thought, calls, foot});
  if (running?.turn === turn) running.card = element;
  paint(element);
  return element;
}

function paint({turn, words, thoughts, thought, calls, foot}) {
  thoughts.hidden = !turn.reasoning;
  thought.textContent = turn.reasoning ?? "";
  if (turn.role === "user") words.textContent = turn.text; else show(words, turn.text);
  words.hidden = !turn.text;
  const shown = (turn.calls ?? []).map(({name, arguments: input}) =>
    make("div", {className: "call"}, make("p", {}, "Calls ", make("code", {}, name)),
      make("pre", {tabIndex: 0, role: "region", "aria-label": `Input of ${name}`}, pretty(input))));
  if (calls.childElementCount !== shown.length || running?.turn === turn) calls.replaceChildren(...shown);
  for (const {name, text} of turn.results ?? []) {
    calls.append(make("p", {className: "result"}, make("code", {}, name), `: ${text}`));
  }
  foot.firstChild?.remove();
  foot.prepend(make("span", {className: "numbers"}, turn.note ?? ""));
}

function pretty(json) {
  try { return JSON.stringify(JSON.parse(json), null, 2); } catch { return json; }
}

/** Gives each message what can be done with it. */
function tools() {
  const cards = [...at("log").querySelectorAll("article")], speaker = able("speak")[0];
  const asked = cards.findLast(card => card.turn.role === "user");
  for (const card of cards) {
    const {turn} = card, last = card === cards.at(-1), actions = [];
    card.foot.querySelector(".actions")?.remove();
    card.querySelector("form")?.remove();
    if (running?.turn === turn) continue;
    if (turn.text) {
      actions.push(button("Copy", () => copy(turn.text).then(() => say("Copied."),
        error => complain(`It cannot be copied: ${error.message}`)), {className: "copy"}));
    }
    if (turn.role === "assistant" && speaker && turn.text) {
      actions.push(button("Listen", event => listen(event.target, turn.text, speaker.id), {className: "listen"}));
    }
    if (!running && last) actions.push(button("Retry", again, {className: "retry"}));
    if (!running && card === asked) actions.push(button("Edit", edit, {className: "edit"}));
    card.foot.append(make("div", {className: "actions"}, ...actions));
    if (!running && last && turn.calls?.length) card.append(results(turn));
  }
}

async function listen(button, text, model) {
  button.textContent = "Stop reading";
  await speak(text, model);
  button.textContent = "Listen";
}

/** Asks for the results of calls, since the page runs no tools. */
function results(turn) {
  const fields = turn.calls.map(() => make("textarea", {rows: 2, required: true}));
  const labels = turn.calls.map(({name}, at) => make("label", {}, `Result of ${name} `, fields[at]));
  const onsubmit = event => {
    event.preventDefault();
    if (!ready()) return;
    turn.results = turn.calls.map(({name}, at) => ({name, text: fields[at].value}));
    current.turns.push(...turn.calls.map(({id}, at) => ({role: "tool", id, text: fields[at].value})));
    draw();
    answer();
  };
  return make("form", {onsubmit}, ...labels, make("button", {className: "main"}, "Send the results"));
}

const near = () => at("log").scrollHeight - at("log").scrollTop - at("log").clientHeight < 80;
function bottom() { at("log").scrollTop = at("log").scrollHeight; }

// Requests.

function messages(conversation) {
  return conversation.turns.map(({role, text, files, calls, id}) => {
    if (role === "tool") return {role, tool_call_id: id, content: text};
    const parts = (files ?? []).map(part);
    const content = parts.length ? [...parts, ...(text ? [{type: "text", text}] : [])] : text;
    const called = calls?.map(({id, name, arguments: input}) =>
      ({id, type: "function", function: {name, arguments: input}}));
    return {role, content, ...(called?.length && {tool_calls: called})};
  });
}

function json(id, what) {
  const text = at(id).value.trim();
  if (!text) return undefined;
  try { return JSON.parse(text); }
  catch (error) { throw new Error(`${what} cannot be read: ${error.message}`); }
}

function request() {
  const number = name => at(name).value === "" ? undefined : Number(at(name).value);
  const system = at("system").value.trim(), schema = json("schema", "The JSON schema");
  const all = messages(current), tools = json("tools", "The list of tools");
  if (system) all.unshift({role: "system", content: system});
  const body = {
    model: at("model").value, messages: all, stream: true, stream_options: {include_usage: true},
    temperature: number("temperature"), top_p: number("top_p"), top_k: number("top_k"), min_p: number("min_p"),
    repetition_penalty: number("repetition_penalty"), max_tokens: number("max_tokens"), seed: number("seed"),
  };
  if (at("thinking").value) body.chat_template_kwargs = {enable_thinking: at("thinking").value === "on"};
  if (schema) body.response_format = {type: "json_schema", json_schema: {name: "answer", schema}};
  if (tools) Object.assign(body, {tools, tool_choice: at("tool_choice").value || undefined});
  return body;
}

/** Adds what a part of a stream has to an answer. True if there is something to show. */
function add(turn, {content, reasoning_content: thinks, tool_calls: calls}) {
  if (content) turn.text += content;
  if (thinks) turn.reasoning += thinks;
  for (const {index, id, function: {name, arguments: input} = {}} of calls ?? []) {
    const made = turn.calls[index] ??= {id, name, arguments: ""};
    made.arguments += input ?? "";
  }
  return Boolean(content || thinks || calls?.length);
}

async function answer() {
  complain();
  let body;
  try { body = request(); } catch (error) { return complain(error.message); }
  const conversation = current, turn = {role: "assistant", model: body.model, text: "", reasoning: "", calls: []};
  const controller = new AbortController();
  const model = chosen(), {loaded} = model;
  turn.note = loaded ? "Reading the prompt …" : "Loading the model …";
  conversation.model = body.model;
  conversation.turns.push(turn);
  running = {controller, conversation, turn};
  at("log").querySelector(".empty")?.remove();
  at("log").append(card(turn));
  busy();
  say("Answering.");
  bottom();
  const start = performance.now();
  let first, last, usage, ended, failed, drawing = false;
  const redraw = () => {
    drawing = false;
    if (running?.turn !== turn) return;
    const follow = near();
    paint(running.card);
    if (follow && conversation === current) bottom();
  };
  try {
    const response = await call("v1/chat/completions", {method: "POST", body, signal: controller.signal});
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage ?? usage;
      const choice = event.choices?.[0];
      ended = choice?.finish_reason ?? ended;
      if (!choice?.delta || !add(turn, choice.delta)) continue;
      last = performance.now();
      if (first === undefined) { first = last; model.loaded = true; describe(); }
      turn.note = "Answering …";
      if (!drawing) { drawing = true; setTimeout(redraw, 50); }
    }
  } catch (error) {
    failed = error;
  }
  const stopped = failed?.name === "AbortError";
  turn.note = [...numbers(loaded && start, first, last, usage), ...(stopped ? ["stopped"] : []),
    ...(ended === "length" ? ["cut at the longest answer"] : [])].join(", ");
  const {card: element} = running;
  running = null;
  paint(element);
  if (failed && !stopped) complain(failed.message);
  if (!turn.text && !turn.reasoning && !turn.calls.length) {
    conversation.turns = conversation.turns.filter(other => other !== turn);
    element.remove();
  }
  busy();
  say(failed && !stopped ? "" : `Answer: ${turn.text || turn.calls.map(({name}) => `calls ${name}`).join(", ")}`);
  if (conversation === current) bottom();
  await save(conversation);
  document.dispatchEvent(new Event("served"));
}

/** What an answer took; without a start, the model was loaded first. */
function numbers(start, first, last, usage) {
  const parts = [];
  if (first !== undefined && start) parts.push(`first text after ${((first - start) / 1000).toFixed(2)} s`);
  if (usage) {
    const count = usage.completion_tokens, seconds = (last - first) / 1000;
    parts.push(`${count} ${count === 1 ? "token" : "tokens"}`);
    if (count > 1 && seconds > 0) parts.push(`${((count - 1) / seconds).toFixed(1)} tokens a second`);
    const reused = usage.prompt_tokens_details?.cached_tokens ?? 0, read = usage.prompt_tokens - reused;
    parts.push(`prompt of ${usage.prompt_tokens} tokens, ${reused} of them reused`);
    if (start && first > start && read > 0) parts.push(`read at ${(read / (first - start) * 1000).toFixed(0)} tokens a second`);
  }
  return parts;
}

function busy() {
  at("stop").hidden = !running;
  describe();
  tools();
  const focused = document.activeElement ?? document.body;
  const free = focused === document.body || at("chat").contains(focused);
  if (free && !document.querySelector("dialog[open]")) at("ask").focus();
}

/** True if a model can answer now. */
function ready() {
  if (!running && !chosen()) complain("There is no model to chat with: choose one among the models.");
  return !running && chosen();
}

async function send() {
  const text = at("ask").value.trim(), files = attached;
  if ((!text && !files.length) || !ready()) return;
  if (editing) current.turns.length = current.turns.findLastIndex(turn => turn.role === "user");
  current.turns.push({role: "user", text, ...(files.length && {files})});
  current.title ||= text.replace(/\s+/g, " ").slice(0, TITLE) || files[0].name;
  attached = [];
  leave();
  list();
  at("ask").value = "";
  draw();
  await save(current);
  await answer();
}

async function again() {
  if (!ready()) return;
  current.turns.length = current.turns.findLastIndex(turn => turn.role === "user") + 1;
  draw();
  if (current.turns.length) await answer();
}

function edit() {
  const turn = current.turns.findLast(turn => turn.role === "user");
  editing = true;
  at("editing").hidden = false;
  at("ask").value = turn.text;
  attached = [...(turn.files ?? [])];
  list();
  at("ask").focus();
}

/** Ends editing. */
function leave() {
  if (editing) { at("ask").value = ""; attached = []; list(); }
  editing = false;
  at("editing").hidden = true;
}

function list() {
  at("attached").replaceChildren(...attached.map(file => {
    const remove = button("×", () => {
      attached = attached.filter(other => other !== file);
      list();
      at("ask").focus();
    }, {"aria-label": `Remove ${file.name}`});
    return make("li", {}, `${file.name} `, remove);
  }));
}

async function take(files) {
  for (const file of files) {
    try { attached.push(await read(file)); }
    catch (error) { complain(`${file.name} cannot be attached: ${error.message}`); }
  }
  list();
}

/** Begins with what the browser has kept. */
export async function start() {
  at("model").onchange = () => { remember("model", at("model").value); describe(); };
  at("composer").onsubmit = event => { event.preventDefault(); send(); };
  at("ask").onkeydown = event => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
  };
  at("ask").onpaste = event => {
    if (event.clipboardData.files.length) { event.preventDefault(); take(event.clipboardData.files); }
  };
  document.ondragover = event => event.preventDefault();
  document.ondrop = event => { event.preventDefault(); take(event.dataTransfer.files); };
  document.onkeydown = event => {
    if (event.key === "Escape" && !document.querySelector("dialog[open]")) running?.controller.abort();
  };
  at("attach").onclick = () => at("file").click();
  at("file").onchange = async () => { await take(at("file").files); at("file").value = ""; };
  at("record").onclick = () => record(at("record"), async blob => {
    attached.push(await recording(blob));
    list();
    say("Recorded.");
  });
  at("dictate").onclick = () => record(at("dictate"), async blob => {
    say("Transcribing.");
    const text = await transcribe(blob, able("transcribe")[0].id);
    at("ask").value = `${at("ask").value} ${text}`.trim();
    at("ask").focus();
    say(`Heard: ${text}`);
  });
  at("stop").onclick = () => running?.controller.abort();
  at("unedit").onclick = () => { leave(); at("ask").focus(); };
  at("fresh").onclick = fresh;
  at("name").onchange = rename;
  at("export").onclick = exported;
  at("delete").onclick = remove;
  window.addEventListener("beforeunload", () => running?.controller.abort());
  enumerate();
  draw();
  try {
    kept = await openStore();
  } catch (error) {
    complain(`This browser keeps no conversations: ${error.message}`);
  }
  const last = kept.find(conversation => conversation.id === recall("open", sessionStorage));
  if (last) { current = last; draw(); }
  enumerate();
  window.addEventListener("pagehide", () => remember("open", current.id, sessionStorage));
}
