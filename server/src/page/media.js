// Files, the microphone and voices.

import {call} from "./api.js";
import {at, complain, make, say} from "./dom.js";

/** Sample rate of audio that is sent. */
const RATE = 16_000;

/** Characters of a text that are spoken at once. */
const SPOKEN = 4096;

const dataUrl = blob => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result);
  reader.onerror = () => reject(reader.error);
  reader.readAsDataURL(blob);
});

/** A file as it is attached to a message: `{kind, name, url}`. */
export async function read(file) {
  if (file.type.startsWith("image/")) return {kind: "image", name: file.name || "image", url: await dataUrl(file)};
  if (file.type.startsWith("audio/")) return {kind: "audio", name: file.name, url: await dataUrl(await wave(file))};
  throw new Error("it is neither an image nor audio");
}

/** The part of a message that a file is sent as. */
export function part({kind, url}) {
  if (kind === "image") return {type: "image_url", image_url: {url}};
  return {type: "input_audio", input_audio: {data: url.slice(url.indexOf(",") + 1), format: "wav"}};
}

/** Audio of any kind that the browser decodes, as a WAV file of one channel. */
async function wave(blob) {
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
  return new Blob([view.buffer], {type: "audio/wav"});
}

let recorder = null;

/** Begins a recording with a button, or ends the one that is under way. `take` gets it as a WAV file. */
export async function record(button, take) {
  if (recorder) return recorder.stop();
  const idle = button.textContent;
  try {
    const stream = await navigator.mediaDevices.getUserMedia({audio: true});
    const pieces = [];
    recorder = new MediaRecorder(stream);
    recorder.ondataavailable = event => pieces.push(event.data);
    recorder.onstop = async () => {
      stream.getTracks().forEach(track => track.stop());
      const type = recorder.mimeType;
      recorder = null;
      button.setAttribute("aria-pressed", "false");
      button.textContent = idle;
      try { await take(await wave(new Blob(pieces, {type}))); }
      catch (error) { complain(`The recording cannot be used: ${error.message}`); }
    };
    recorder.start();
    button.setAttribute("aria-pressed", "true");
    button.textContent = "End the recording";
    say("Recording.");
  } catch (error) {
    recorder = null;
    complain(`The microphone cannot be used: ${error.message}`);
  }
}

/** A recording as an attachment. */
export async function recording(blob) {
  return {kind: "audio", name: "Recording", url: await dataUrl(blob)};
}

/** The text of a recording. */
export async function transcribe(blob, model) {
  const form = new FormData();
  form.append("file", blob, blob.name ?? "recording.wav");
  form.append("model", model);
  form.append("response_format", "json");
  return (await (await call("v1/audio/transcriptions", {method: "POST", body: form})).json()).text;
}

let spoken = null;

/** Speaks a text, or ends what is spoken. */
export async function speak(text, model) {
  if (spoken) return spoken.abort();
  const speaking = spoken = new AbortController();
  const {signal} = speaking;
  try {
    // Marks of Markdown are not words.
    const plain = text.replace(/[`*_#>|]+/g, " ").trim();
    for (let from = 0; from < plain.length && !signal.aborted;) {
      const piece = plain.slice(from, from + SPOKEN);
      const end = from + SPOKEN < plain.length ? Math.max(piece.lastIndexOf(". ") + 1, piece.lastIndexOf(" ")) : 0;
      const input = end > 0 ? piece.slice(0, end) : piece;
      from += input.length;
      const voice = at("voice").value || undefined;
      const body = {model, input, voice, response_format: "wav"};
      const response = await call("v1/audio/speech", {method: "POST", body, signal});
      await play(await response.blob(), signal);
    }
  } catch (error) {
    if (error.name !== "AbortError") complain(`The answer cannot be spoken: ${error.message}`);
  } finally {
    if (spoken === speaking) spoken = null;
  }
}

/** Plays audio to its end, or until it is aborted. */
async function play(blob, signal) {
  const url = URL.createObjectURL(blob), audio = make("audio", {src: url});
  try {
    await new Promise((resolve, reject) => {
      audio.onended = resolve;
      audio.onerror = () => reject(new Error("the browser does not play it"));
      signal.onabort = () => { audio.pause(); resolve(); };
      audio.play().catch(reject);
    });
  } finally {
    URL.revokeObjectURL(url);
  }
}
