// Conversations in this browser: within a bound, in IndexedDB.

/** Conversations, and characters of all of them together as JSON, that are kept. */
const MAX_COUNT = 200, MAX_SIZE = 64e6;

let database = null;
/** Sizes of what is kept, by id. */
const sizes = new Map();

const done = request => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});
const all = mode => database.transaction("conversations", mode).objectStore("conversations");

/** Opens the store and returns the conversations in it, the newest first. */
export async function open() {
  const opening = indexedDB.open("qhx", 1);
  opening.onupgradeneeded = () => opening.result.createObjectStore("conversations", {keyPath: "id"});
  database = await done(opening);
  const found = await done(all("readonly").getAll());
  for (const one of found) sizes.set(one.id, JSON.stringify(one).length);
  return found.sort((a, b) => b.updated - a.updated);
}

/** Keeps a conversation, or says why it is not kept. */
export async function keep(conversation) {
  const size = JSON.stringify(conversation).length;
  const others = [...sizes].filter(([id]) => id !== conversation.id);
  const total = others.reduce((sum, [, size]) => sum + size, size);
  const advice = "Export it, or delete others; until then it is lost when the page is closed.";
  if (!database) throw new Error("This browser keeps no conversations: it has no storage for this page.");
  if (others.length >= MAX_COUNT) {
    throw new Error(`This conversation is not kept: there are ${MAX_COUNT} already. ${advice}`);
  }
  if (total > MAX_SIZE) {
    throw new Error(`This conversation is not kept: all would take more than ${MAX_SIZE / 1e6} MB. ${advice}`);
  }
  try {
    await done(all("readwrite").put(conversation));
  } catch (error) {
    throw new Error(`This conversation is not kept: the browser has no more room (${error.name}). ${advice}`);
  }
  sizes.set(conversation.id, size);
}

export async function forget(id) {
  sizes.delete(id);
  if (database) await done(all("readwrite").delete(id));
}
