// Elements, messages and words that all views use.

export const at = id => document.getElementById(id);

/** An element with these properties or attributes and children. Text stays text. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name in element) element[name] = value; else element.setAttribute(name, value);
  }
  element.append(...children.filter(child => child !== undefined && child !== null && child !== false));
  return element;
}

/** A button. */
export function button(text, action, properties = {}) {
  return make("button", {type: "button", onclick: action, ...properties}, text);
}

/** Says something to a screen reader. */
export function say(text) { at("status").textContent = text; }

/** Shows what went wrong; without a text, nothing any more. */
export function complain(text) {
  at("why").textContent = text ?? "";
  at("error").hidden = !text;
}

/** Asks for a decision. */
export function decide(question, verb) {
  const dialog = at("decide");
  at("question").textContent = question;
  at("yes").textContent = verb;
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise(resolve => {
    dialog.onclose = () => resolve(dialog.returnValue === "yes");
  });
}

export function bytes(count) {
  const units = ["bytes", "kB", "MB", "GB", "TB"];
  let unit = 0;
  for (; count >= 1000 && unit < units.length - 1; unit++) count /= 1000;
  return `${count >= 100 || unit === 0 ? Math.round(count) : count.toFixed(1)} ${units[unit]}`;
}

export async function copy(text) {
  // The clipboard is there on this machine and over TLS only.
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const field = make("textarea", {value: text, className: "unseen"});
  document.body.append(field);
  field.select();
  const copied = document.execCommand("copy");
  field.remove();
  if (!copied) throw new Error("The browser does not allow it.");
}

/** Gives a file to the browser to save. */
export function download(name, blob) {
  const url = URL.createObjectURL(blob);
  make("a", {href: url, download: name}).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/** A value that the browser keeps for this page; without storage it is lost with the page. */
export function recall(name, storage = localStorage) {
  try { return storage.getItem(`qhx.${name}`) ?? ""; } catch { return ""; }
}
export function remember(name, value, storage = localStorage) {
  try { storage.setItem(`qhx.${name}`, value); } catch { /* It is not kept. */ }
}
