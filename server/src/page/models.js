// Models of the index, on this machine and loaded; and the state of the machine.

import {call, lines} from "./api.js";
import * as audio from "./audio.js";
import {at, button, bytes, complain, decide, make, say} from "./dom.js";
import {show} from "./markdown.js";

const STATES = {available: "Not here", here: "Fetched", served: "Ready", loaded: "Loaded", pulling: "Pulling"};
const DOES = {
  text: "text", image: "sees images", audio: "hears audio", video: "sees videos", transcribe: "speech to text",
  speak: "text to speech", embed: "vectors", rerank: "ranking",
};

/** Pulls that are followed at once: a browser has six connections to a server. */
const FOLLOWED = 3;

let models = [], index = false;
/** Pulls that this page follows, by name: their last lines. */
const pulls = new Map();
/** Loading, unloading and removing under way, by name. */
const working = new Map();

export async function refresh() {
  const list = await (await call("api/catalog")).json();
  ({models, index} = list);
  at("no-index").hidden = index && !list.error;
  at("no-index").textContent = list.error ? `The index cannot be read: ${list.error}`
    : "This server offers no further models: it serves those that it was started with.";
  draw();
  for (const {name, state} of models) if (state === "pulling" && pulls.size < FOLLOWED) pull(name);
}

function draw() {
  const focused = document.activeElement?.closest("#models .model button");
  const mark = focused && [focused.closest("li").dataset.name, focused.dataset.action];
  const words = at("find").value.trim().toLowerCase().split(/\s+/), kind = at("kind").value;
  const fits = ({name, title, licence, does}) => (!kind || does.includes(kind))
    && words.every(word => `${name} ${title} ${licence ?? ""}`.toLowerCase().includes(word));
  const found = models.filter(fits), away = model => model.state === "available" || model.state === "pulling";
  fill("here", found.filter(model => !away(model)), models.some(model => !away(model)), "No model is here yet.");
  fill("more", found.filter(away), models.some(away), "All models of the index are here.");
  at("more-title").hidden = at("more").hidden = !index;
  if (!index) at("no-more").hidden = true;
  if (!mark) return;
  const item = [...document.querySelectorAll("#models .model")].find(item => item.dataset.name === mark[0]);
  (item?.querySelector(`[data-action="${mark[1]}"]`) ?? item?.querySelector("button") ?? at("models-title")).focus();
}

function fill(id, found, any, none) {
  at(id).replaceChildren(...found.map(card));
  at(id).hidden = !found.length;
  at(`no-${id}`).hidden = found.length > 0;
  at(`no-${id}`).textContent = any ? "No model is like that." : none;
}

function card(model) {
  const {name, title, does, licence, note, error} = model, state = pulls.has(name) ? "pulling" : model.state;
  const sizes = [
    state === "available" && model.fetch_bytes && `${bytes(model.fetch_bytes)} to fetch`,
    model.disk_bytes && `${bytes(model.disk_bytes)} on disk`,
    model.loaded_bytes && `${bytes(model.loaded_bytes)} in memory`,
  ];
  const facts = [does.map(one => DOES[one] ?? one).join(", "), licence, ...sizes].filter(Boolean);
  const item = make("li", {className: "model"},
    make("div", {className: "row"}, make("h4", {}, title), make("span", {className: `badge ${state}`},
      working.get(name) ?? STATES[state] ?? state)),
    title !== name && make("p", {className: "faint"}, name),
    make("p", {}, facts.join(" · ")),
    note && make("p", {className: "note"}, note.charAt(0).toUpperCase() + note.slice(1)),
    error && state !== "pulling" && make("p", {className: "bad"}, error),
    state === "pulling" && progress(model),
    make("div", {className: "row"}, ...actions(model, state)));
  item.dataset.name = name;
  return item;
}

function actions({name, title, does, removable, fetch_bytes: size}, state) {
  if (working.has(name)) return [];
  const action = (word, label, act, kind) => {
    const made = button(label, act, {className: kind, "aria-label": `${label}: ${title}`});
    made.dataset.action = word;
    return made;
  };
  const actions = {
    available: [action("pull", size ? `Pull ${bytes(size)}` : "Pull", () => pull(name), "main")],
    pulling: [action("cancel", "Cancel", () => cancel(name))],
    here: [action("pull", "Start", () => pull(name), "main")],
    served: [action("load", "Load", () => load(name, true))],
    loaded: [action("load", "Unload", () => load(name, false))],
  }[state] ?? [];
  if (does.includes("text") && (state === "served" || state === "loaded")) {
    const chat = () => document.dispatchEvent(new CustomEvent("chat", {detail: name}));
    actions.unshift(action("chat", "Chat", chat, "main"));
  }
  if (state === "served" || state === "loaded") {
    if (does.includes("speak")) actions.unshift(action("speak", "Speak", () => audio.speaking(name, title), "main"));
    if (does.includes("transcribe") && !does.includes("text")) {
      actions.unshift(action("hear", "Transcribe", () => audio.hearing(name, title), "main"));
    }
  }
  if (removable && state !== "pulling") actions.push(action("remove", "Remove", () => remove(name, title), "danger"));
  return actions;
}

function progress({name, title, progress: last}) {
  const bar = make("progress", {"aria-label": `Pulling ${title}`}), text = make("span", {});
  const element = make("div", {className: "pull"}, bar, text);
  step(element, pulls.get(name)?.line ?? last ?? {status: "waiting"});
  return element;
}

function step(element, {status, completed, total, rate}) {
  const [bar, text] = element.children;
  if (total) { bar.max = total; bar.value = completed; } else bar.removeAttribute("value");
  const count = total ? `, ${bytes(completed)} of ${bytes(total)}` : "";
  text.textContent = `${status}${count}${rate ? `, ${bytes(rate)} a second` : ""}`;
}

/** Pulls a model, or follows the pull that is under way. It goes on without this page. */
async function pull(name) {
  if (pulls.has(name)) return;
  const model = models.find(model => model.name === name), followed = {line: {status: "waiting"}};
  const follows = pulls.size < FOLLOWED;
  pulls.set(name, followed);
  delete model.error;
  draw();
  say(`Pulling ${model.title}.`);
  let begun, status, failed, last = {};
  try {
    for await (const line of lines(await call("api/pull", {method: "POST", body: {model: name}}))) {
      if (line.error) throw new Error(line.error);
      if (line.status !== status) begun = {time: performance.now(), bytes: line.completed ?? 0};
      status = line.status;
      const seconds = (performance.now() - begun.time) / 1000;
      if (line.total && seconds > 1) line.rate = Math.max(0, (line.completed - begun.bytes) / seconds);
      followed.line = last = line;
      const shown = [...document.querySelectorAll("#models .model")].find(item => item.dataset.name === name);
      const element = shown?.querySelector(".pull");
      if (element) step(element, line);
      if (!follows) break;
    }
    if (follows && last.status !== "success") throw new Error("The pull ended without a result: the server has stopped.");
  } catch (error) {
    failed = error;
  }
  pulls.delete(name);
  await refresh().catch(error => complain(error.message));
  const cancelled = failed?.message.includes("cancelled");
  if (failed && !cancelled) {
    complain(`${model.title} cannot be pulled: ${failed.message}`);
    say("");
  } else if (follows) {
    say(cancelled ? `The pull of ${model.title} is cancelled.` : `${model.title} is ready.`);
  }
  document.dispatchEvent(new Event("served"));
}

async function cancel(name) {
  await work(name, "Cancelling", () => call(`api/pull/${name.split("/").map(encodeURIComponent).join("/")}`,
    {method: "DELETE"}));
}

async function load(name, on) {
  await work(name, on ? "Loading" : "Unloading",
    () => call("api/generate", {method: "POST", body: {model: name, ...(!on && {keep_alive: 0})}}));
  document.dispatchEvent(new Event("served"));
}

async function remove(name, title) {
  if (!await decide(`Remove ${title} from this machine? It can be pulled again.`, "Remove")) return;
  await work(name, "Removing", async () => {
    const {freed_bytes: freed} = await (await call("api/delete", {method: "DELETE", body: {model: name}})).json();
    say(`${title} is removed: ${bytes(freed)} are free again.`);
  });
  document.dispatchEvent(new Event("served"));
  at("models-title").focus();
}

/** Does something with a model, and shows that. */
async function work(name, word, act) {
  working.set(name, word);
  draw();
  complain();
  try { await act(); } catch (error) { complain(error.message); }
  working.delete(name);
  await refresh().catch(error => complain(error.message));
}

/** Shows the state of the machine. */
export async function check() {
  at("check").disabled = true;
  at("health").textContent = "Checking …";
  try {
    const {version, healthy, checks, environment} = await (await call("api/doctor")).json();
    at("health").textContent = `qhx ${version}: ${healthy ? "all that is here works" : "something is broken"}.`;
    at("checks").replaceChildren(...checks.map(({name, health, found, details = {}, hint}) =>
      make("li", {}, make("div", {className: "row"}, make("h3", {}, name),
        make("span", {className: `badge ${health}`}, health)),
        make("p", {}, found), Object.keys(details).length > 0 && make("dl", {}, ...terms(details)),
        hint && remark(hint))));
    at("environment").hidden = !Object.keys(environment ?? {}).length;
    at("environment").querySelector("dl").replaceChildren(...terms(environment ?? {}));
  } catch (error) {
    at("checks").replaceChildren();
    at("health").textContent = error.message;
  }
  at("check").disabled = false;
  say(at("health").textContent);
}

/** A hint, in which commands stand between backticks. */
function remark(hint) {
  const element = make("div", {className: "note"});
  show(element, hint);
  return element;
}

function terms(values) {
  const text = value => Array.isArray(value) ? value.map(text).join(", ")
    : typeof value === "object" ? JSON.stringify(value) : String(value);
  return Object.entries(values).flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, text(value))]);
}

export function start() {
  const kinds = Object.entries(DOES).map(([kind, words]) => new Option(words, kind));
  at("kind").replaceChildren(new Option("anything", ""), ...kinds);
  at("kind").onchange = at("find").oninput = draw;
  at("check").onclick = check;
}
