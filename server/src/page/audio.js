// Models that speak and models that transcribe, without a chat.

import {call} from "./api.js";
import {at, copy, download, say} from "./dom.js";
import {record, transcribe} from "./media.js";

/** The model of the open dialog, and the audio that it made. */
let model = "", spoken = null;

function wrong(dialog, error) {
  at(`${dialog}-why`).textContent = error?.message ?? "";
  at(`${dialog}-why`).hidden = !error;
}

/** Shows what speaks a text. */
export async function speaking(name, title) {
  model = name;
  at("speaking-title").textContent = `Speak with ${title}`;
  wrong("speaking");
  at("spoken").hidden = at("save").hidden = true;
  at("speaking").showModal();
  try {
    const {voices = []} = await (await call(`v1/models/${encodeURI(name)}`)).json();
    at("own-voice").replaceChildren(...voices.map(voice => new Option(voice, voice)));
    at("own-voices").hidden = !voices.length;
  } catch (error) {
    wrong("speaking", error);
  }
}

async function speak() {
  const input = at("words").value.trim();
  if (!input) return at("words").focus();
  wrong("speaking");
  at("speak").disabled = true;
  say("Speaking.");
  try {
    const body = {model, input, voice: at("own-voice").value || undefined, response_format: "wav"};
    spoken = await (await call("v1/audio/speech", {method: "POST", body})).blob();
    URL.revokeObjectURL(at("spoken").src);
    at("spoken").src = URL.createObjectURL(spoken);
    at("spoken").hidden = at("save").hidden = false;
    say("The text is spoken.");
    await at("spoken").play().catch(() => { /* The person starts it. */ });
  } catch (error) {
    wrong("speaking", error);
  }
  at("speak").disabled = false;
}

/** Shows what transcribes a file or a recording. */
export function hearing(name, title) {
  model = name;
  at("hearing-title").textContent = `Transcribe with ${title}`;
  wrong("hearing");
  at("heard").value = at("heard-file").value = "";
  at("hear").hidden = !navigator.mediaDevices;
  at("hearing").showModal();
}

async function hear(blob) {
  wrong("hearing");
  at("heard").value = "";
  at("heard").placeholder = "Transcribing …";
  say("Transcribing.");
  try {
    at("heard").value = await transcribe(blob, model);
    say(`Heard: ${at("heard").value}`);
  } catch (error) {
    wrong("hearing", error);
  }
  at("heard").placeholder = "";
}

export function start() {
  at("speak").onclick = speak;
  at("save").onclick = () => download("speech.wav", spoken);
  at("speaking").onclose = () => at("spoken").pause();
  at("hear").onclick = () => record(at("hear"), hear);
  at("heard-file").onchange = () => at("heard-file").files[0] && hear(at("heard-file").files[0]);
  at("take").onclick = () => copy(at("heard").value).then(() => say("Copied."), error => wrong("hearing", error));
}
