//! Configuration of a session, in the form of the API and in its older one.

use serde_json::{Value, json};

use crate::error::{ApiError, Result};
use crate::fields::Fields;
use crate::recording::Pcm;

/// Rates of `audio/pcm`. The API has 24 kHz alone.
const RATES: (u64, u64) = (8_000, 48_000);
/// Greatest times of turns in milliseconds.
const MAX_PREFIX: u64 = 5_000;
const MAX_SILENCE: u64 = 10_000;

/// Coding of the audio that a client appends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Encoding {
    /// Signed 16 bits, the low byte first.
    Pcm(u32),
    /// G.711 at 8 kHz: µ-law.
    MuLaw,
    /// G.711 at 8 kHz: A-law.
    ALaw,
}

impl Encoding {
    /// Layout of its decoded samples.
    pub(super) fn pcm(self) -> Pcm {
        let rate = if let Self::Pcm(rate) = self { rate } else { 8_000 };
        Pcm { rate, width: 2, channels: 1 }
    }

    /// The samples of some bytes.
    pub(super) fn decode(self, bytes: &[u8]) -> Result<Vec<i16>> {
        let pairs = bytes.chunks_exact(2);
        match self {
            Self::MuLaw => Ok(bytes.iter().map(|byte| mu_law(*byte)).collect()),
            Self::ALaw => Ok(bytes.iter().map(|byte| a_law(*byte)).collect()),
            Self::Pcm(_) if !pairs.remainder().is_empty() => {
                let message = format!(
                    "expected whole samples of 2 bytes each, found {} bytes: split the audio between samples",
                    bytes.len()
                );
                Err(ApiError::bad("audio", message).code("invalid_value"))
            }
            Self::Pcm(_) => {
                let sample = |pair: &[u8]| match *pair {
                    [low, high] => i16::from_le_bytes([low, high]),
                    _ => 0,
                };
                Ok(pairs.map(sample).collect())
            }
        }
    }

    fn json(self) -> Value {
        match self {
            Self::Pcm(rate) => json!({"type": "audio/pcm", "rate": rate}),
            Self::MuLaw => json!({"type": "audio/pcmu"}),
            Self::ALaw => json!({"type": "audio/pcma"}),
        }
    }
}

/// A sample of ITU-T G.711's µ-law.
fn mu_law(byte: u8) -> i16 {
    const BIAS: i16 = 0x84;
    let byte = !byte;
    let value = ((i16::from(byte & 0xf) << 3) + BIAS) << (byte >> 4 & 7);
    if byte & 0x80 == 0 { value - BIAS } else { BIAS - value }
}

/// A sample of ITU-T G.711's A-law.
fn a_law(byte: u8) -> i16 {
    let byte = byte ^ 0x55;
    let (mantissa, exponent) = (i16::from(byte & 0xf) << 4, byte >> 4 & 7);
    let value = match exponent {
        0 => mantissa + 8,
        exponent => (mantissa + 0x108) << (exponent - 1),
    };
    if byte & 0x80 == 0 { -value } else { value }
}

/// Parameters of the turns that the server finds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Turns {
    pub threshold: f32,
    /// Milliseconds of audio in front of the speech that belong to it.
    pub prefix: u64,
    /// Milliseconds of silence that end a turn.
    pub silence: u64,
}

impl Default for Turns {
    fn default() -> Self {
        Self { threshold: 0.5, prefix: 300, silence: 500 }
    }
}

/// Configuration of a session.
#[derive(Debug, Clone)]
pub(super) struct Session {
    pub id: String,
    /// Seconds since 1970.
    pub expires: u64,
    pub encoding: Encoding,
    /// `None` where the client ends turns.
    pub turns: Option<Turns>,
    pub model: Option<String>,
    pub language: Option<String>,
    pub prompt: Option<String>,
    /// The client speaks the API's older form.
    pub beta: bool,
}

impl Session {
    /// The configuration with the changes of an event: what it leaves out stays.
    pub(super) fn updated(&self, update: &Value) -> Result<Self> {
        let fields = Fields::of(update, "session")?;
        if fields.text("type")?.is_some_and(|kind| kind != "transcription") {
            let message = "expected transcription: sessions that answer are not supported here";
            return Err(ApiError::bad("session.type", message).code("unsupported"));
        }
        fields.unsupported(&["include"])?;
        let mut session = self.clone();
        if let Some(audio) = fields.object("audio")? {
            audio.unsupported(&["output"])?;
            if let Some(input) = audio.object("input")? {
                if let Some(format) = input.object("format")? {
                    session.encoding = encoding(&format)?;
                }
                input.unsupported(&["noise_reduction"])?;
                session.transcription(input.object("transcription")?)?;
                session.turn_detection(&input)?;
            }
        }
        // The older form.
        fields.unsupported(&["input_audio_noise_reduction"])?;
        session.encoding = match fields.text("input_audio_format")? {
            None => session.encoding,
            Some("pcm16") => Encoding::Pcm(24_000),
            Some("g711_ulaw") => Encoding::MuLaw,
            Some("g711_alaw") => Encoding::ALaw,
            Some(_) => {
                return Err(fields.wrong("input_audio_format", "pcm16, g711_ulaw or g711_alaw"));
            }
        };
        session.transcription(fields.object("input_audio_transcription")?)?;
        session.turn_detection(&fields)?;
        Ok(session)
    }

    fn transcription(&mut self, fields: Option<Fields<'_>>) -> Result<()> {
        let Some(fields) = fields else { return Ok(()) };
        let filled = |text: &str| Some(text.to_owned()).filter(|text| !text.trim().is_empty());
        if let Some(model) = fields.text("model")? {
            self.model = Some(model.to_owned());
        }
        // An empty text takes one back.
        if let Some(language) = fields.text("language")? {
            self.language = filled(language);
        }
        if let Some(prompt) = fields.text("prompt")? {
            self.prompt = filled(prompt);
        }
        Ok(())
    }

    fn turn_detection(&mut self, input: &Fields<'_>) -> Result<()> {
        const NAME: &str = "turn_detection";
        if input.map().get(NAME).is_some_and(Value::is_null) {
            self.turns = None;
        }
        let Some(fields) = input.object(NAME)? else { return Ok(()) };
        fields.only("type", &"server_vad".into())?;
        let turns = self.turns.unwrap_or_default();
        let millis = |name, max, usual: u64| -> Result<u64> {
            Ok(fields.count(name, 0, max)?.map_or(usual, |count| count as u64))
        };
        self.turns = Some(Turns {
            threshold: fields.number("threshold", 0.0, 1.0)?.unwrap_or(turns.threshold),
            prefix: millis("prefix_padding_ms", MAX_PREFIX, turns.prefix)?,
            silence: millis("silence_duration_ms", MAX_SILENCE, turns.silence)?,
        });
        Ok(())
    }

    /// The session as events have it.
    pub(super) fn json(&self) -> Value {
        let turns = self.turns.map(|turns| {
            json!({
                "type": "server_vad",
                "threshold": turns.threshold,
                "prefix_padding_ms": turns.prefix,
                "silence_duration_ms": turns.silence,
            })
        });
        let transcription =
            json!({"model": self.model, "language": self.language, "prompt": self.prompt});
        let common = json!({
            "id": self.id,
            "object": "realtime.transcription_session",
            "expires_at": self.expires,
            "include": null,
        });
        let more = if self.beta {
            let format = match self.encoding {
                Encoding::Pcm(_) => "pcm16",
                Encoding::MuLaw => "g711_ulaw",
                Encoding::ALaw => "g711_alaw",
            };
            json!({
                "input_audio_format": format,
                "input_audio_transcription": transcription,
                "input_audio_noise_reduction": null,
                "turn_detection": turns,
            })
        } else {
            let input = json!({
                "format": self.encoding.json(),
                "transcription": transcription,
                "noise_reduction": null,
                "turn_detection": turns,
            });
            json!({"type": "transcription", "audio": {"input": input}})
        };
        let mut session = common;
        if let (Value::Object(session), Value::Object(more)) = (&mut session, more) {
            session.extend(more);
        }
        session
    }
}

fn encoding(format: &Fields<'_>) -> Result<Encoding> {
    let (min, max) = RATES;
    match format.needed("type")? {
        "audio/pcm" => {
            let rate = format.count("rate", min, max)?.unwrap_or(24_000);
            Ok(Encoding::Pcm(u32::try_from(rate).unwrap_or(24_000)))
        }
        "audio/pcmu" => Ok(Encoding::MuLaw),
        "audio/pcma" => Ok(Encoding::ALaw),
        _ => Err(format.wrong("type", "audio/pcm, audio/pcmu or audio/pcma")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn session() -> Session {
        Session {
            id: "sess_1".to_owned(),
            expires: 1,
            encoding: Encoding::Pcm(24_000),
            turns: Some(Turns::default()),
            model: None,
            language: None,
            prompt: None,
            beta: false,
        }
    }

    fn updated(session: &Session, update: Value) -> Result<Session> {
        session.updated(&update)
    }

    #[test]
    fn both_forms_say_the_same() {
        let transcription = json!({"model": "heard", "language": "de", "prompt": "Ann"});
        let turns = json!({"type": "server_vad", "threshold": 0.25, "silence_duration_ms": 200});
        let input = json!({
            "format": {"type": "audio/pcmu"},
            "transcription": transcription,
            "turn_detection": turns,
            "noise_reduction": null,
        });
        let newer = json!({"type": "transcription", "audio": {"input": input}});
        let older = json!({
            "input_audio_format": "g711_ulaw",
            "input_audio_transcription": transcription,
            "turn_detection": turns,
        });
        let newer = updated(&session(), newer).unwrap();
        assert_eq!(newer.json(), updated(&session(), older).unwrap().json());
        let input = &newer.json()["audio"]["input"];
        assert_eq!(input["turn_detection"]["prefix_padding_ms"], 300, "the rest is as usual");
        // What an update leaves out stays, and null ends it.
        let manual = json!({"audio": {"input": {"turn_detection": null}}});
        let manual = updated(&newer, manual).unwrap();
        assert_eq!((manual.turns, manual.language.as_deref()), (None, Some("de")));
    }

    #[test]
    fn what_is_not_done_is_refused_by_its_name() {
        for (update, param) in [
            (json!({"type": "realtime"}), "session.type"),
            (json!({"audio": {"output": {"voice": "alloy"}}}), "session.audio.output"),
            (
                json!({"audio": {"input": {"noise_reduction": {"type": "near_field"}}}}),
                "session.audio.input.noise_reduction",
            ),
            (
                json!({"audio": {"input": {"turn_detection": {"type": "semantic_vad"}}}}),
                "session.audio.input.turn_detection.type",
            ),
            (
                json!({"audio": {"input": {"format": {"type": "audio/pcm", "rate": 0}}}}),
                "session.audio.input.format.rate",
            ),
            (json!({"turn_detection": {"threshold": 2}}), "session.turn_detection.threshold"),
            (json!({"include": ["item.input_audio_transcription.logprobs"]}), "session.include"),
            (json!({"input_audio_format": "mp3"}), "session.input_audio_format"),
            (json!({"audio": []}), "session.audio"),
        ] {
            let error = updated(&session(), update).unwrap_err().json();
            assert_eq!(error["error"]["param"], param, "{error}");
        }
    }

    /// Some values of the tables of G.711.
    #[test]
    fn telephone_audio_is_decoded() {
        let decoded =
            |encoding: Encoding| encoding.decode(&[0x00, 0x7f, 0x80, 0xff, 0x2a]).unwrap();
        assert_eq!(decoded(Encoding::MuLaw), [-32_124, 0, 32_124, 0, -5372]);
        let decoded = Encoding::ALaw.decode(&[0x2a, 0x55, 0xaa, 0xd5, 0x00]).unwrap();
        assert_eq!(decoded, [-32_256, -8, 32_256, 8, -5504]);
        let odd = Encoding::Pcm(24_000).decode(&[1, 2, 3]).unwrap_err().json();
        assert!(odd["error"]["message"].as_str().unwrap().contains("found 3 bytes"), "{odd}");
    }
}
