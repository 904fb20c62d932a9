// The page: its views, settings and theme.

import {call} from "./api.js";
import * as audio from "./audio.js";
import * as chat from "./chat.js";
import {at, complain, recall, remember, say} from "./dom.js";
import * as models from "./models.js";

const VIEWS = ["chats", "chat", "models", "machine"];
const THEMES = {"": "auto", light: "light", dark: "dark"};
/** Settings that the browser keeps. */
const FIELDS = ["system", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed",
  "thinking", "schema", "tools", "tool_choice", "voice"];

async function load() {
  const list = await (await call("v1/models")).json();
  chat.serve(list.data);
  return list.data;
}

function view() {
  const name = location.hash.slice(1), known = VIEWS.includes(name) ? name : "chat";
  document.body.dataset.view = known;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${known}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = known === "chat" ? "qhx" : `qhx: ${known}`;
  if (known === "models") models.refresh().catch(error => complain(error.message));
  if (known === "machine") models.check();
}

/** Gives the focus to the view that is shown. */
function focus() {
  const {view} = document.body.dataset;
  (view === "chat" ? at("ask") : at(`${view}-title`)).focus();
}

function dress() {
  const {dataset} = document.documentElement;
  at("theme").textContent = `Theme: ${THEMES[dataset.theme] ?? THEMES[""]}`;
}

function start() {
  for (const id of FIELDS) {
    at(id).value = recall(id);
    at(id).addEventListener("change", () => remember(id, at(id).value));
  }
  at("key").value = recall("key", sessionStorage);
  at("key").onchange = () => {
    remember("key", at("key").value, sessionStorage);
    load().then(() => { complain(); view(); }, error => complain(error.message));
  };
  document.addEventListener("key", () => {
    if (!at("settings").open) at("settings").showModal();
    at("key").focus();
  });
  document.addEventListener("served", () => load().catch(() => {}));
  document.addEventListener("chat", async ({detail}) => {
    await load().catch(error => complain(error.message));
    chat.choose(detail);
    location.hash = "#chat";
  });
  at("options").onclick = () => at("settings").showModal();
  at("defaults").onclick = () => {
    for (const id of FIELDS) { at(id).value = id === "voice" ? at(id).value : ""; remember(id, ""); }
    say("The settings are back at their defaults.");
  };
  at("theme").onclick = () => {
    const names = Object.keys(THEMES), {dataset} = document.documentElement;
    dataset.theme = names[(names.indexOf(dataset.theme ?? "") + 1) % names.length];
    remember("theme", dataset.theme);
    dress();
  };
  at("dismiss").onclick = () => { complain(); focus(); };
  at("yes").onclick = () => at("decide").close("yes");
  for (const close of document.querySelectorAll("[data-close]")) {
    close.onclick = () => close.closest("dialog").close();
  }
  window.addEventListener("hashchange", () => {
    view();
    focus();
  });
  models.start();
  audio.start();
  dress();
  view();
  chat.start();
  load().then(served => {
    const able = served.some(model => model.abilities.includes("generate"));
    if (!able && !location.hash) location.replace("#models");
    // On a phone that would bring up the keyboard.
    else if (document.body.dataset.view === "chat" && matchMedia("(pointer: fine)").matches) at("ask").focus();
  }, error => complain(error.message));
}

start();
