//! Conversations from the manifest's markers.

use super::Tokenizer;
use super::chat::{Message, RenderOptions};
use crate::manifest::{ChatSpec, Marker, Piece, RoleMarkers};
use crate::{Error, ErrorKind, Result};

/// Markers of a known form, used where the manifest does not give its own.
struct Format {
    /// What tells the form from others.
    signs: &'static [&'static str],
    system: [&'static str; 2],
    user: [&'static str; 2],
    assistant: [&'static str; 2],
}

/// ChatML, which is the default, and the form of Phi-3.
const FORMATS: [Format; 2] = [
    Format {
        signs: &["<|im_start|>"],
        system: ["<|im_start|>system\n", "<|im_end|>\n"],
        user: ["<|im_start|>user\n", "<|im_end|>\n"],
        assistant: ["<|im_start|>assistant\n", "<|im_end|>\n"],
    },
    Format {
        signs: &["<|assistant|>", "<|user|>"],
        system: ["<|system|>\n", "<|end|>\n"],
        user: ["<|user|>\n", "<|end|>\n"],
        assistant: ["<|assistant|>\n", "<|end|>\n"],
    },
];

/// All markers as text.
#[derive(Debug)]
pub(super) struct Markers {
    bos: String,
    system: [String; 2],
    user: [String; 2],
    assistant: [String; 2],
    generation: String,
    generation_without_thinking: String,
}

impl Markers {
    pub(super) fn new(spec: &ChatSpec, tokenizer: Option<&Tokenizer>) -> Result<Self> {
        let text = |place: &str, marker: &Marker| spell(place, marker, tokenizer);
        let role = |name: &str, markers: &RoleMarkers| {
            let one = |part: &str, marker: &Option<Marker>| {
                marker.as_ref().map(|m| text(&format!("/chat/{name}/{part}"), m)).transpose()
            };
            Ok::<_, Error>([one("prefix", &markers.prefix)?, one("suffix", &markers.suffix)?])
        };
        let system = role("system", &spec.system)?;
        let user = role("user", &spec.user)?;
        let assistant = role("assistant", &spec.assistant)?;
        let prefill = |key: &str, marker: &Option<Marker>| {
            let marker = marker.as_ref();
            marker.map(|m| text(&format!("/chat/assistant/{key}"), m)).transpose()
        };
        let generation = prefill("gen_prefill", &spec.gen_prefill)?;
        let without = prefill("no_think_prefill", &spec.no_think_prefill)?;

        let given = [&system, &user, &assistant].into_iter().flatten();
        let given: Vec<_> = given.chain([&generation, &without]).flatten().collect();
        let format = FORMATS
            .iter()
            .find(|f| f.signs.iter().any(|sign| given.iter().any(|text| text.contains(sign))))
            .unwrap_or(&FORMATS[0]);
        let or = |[prefix, suffix]: [Option<String>; 2], default: [&str; 2]| {
            [
                prefix.unwrap_or_else(|| default[0].to_owned()),
                suffix.unwrap_or_else(|| default[1].to_owned()),
            ]
        };
        let assistant_prefix_given = assistant[0].is_some();
        let mut assistant = or(assistant, format.assistant);
        let header = assistant[0].trim_end();
        // What the answer begins with after the assistant's header. A prefill with a header of its
        // own, such as `<|assistant|>` without a line break, also spells that of earlier answers.
        let mut header_spelled = None;
        let mut body = |prefill: Option<&String>| -> String {
            let Some(text) = prefill else { return String::new() };
            let Some(rest) = text.strip_prefix(header).filter(|_| !header.is_empty()) else {
                return text.clone();
            };
            let spaces = rest.len() - rest.trim_start().len();
            header_spelled = Some(format!("{header}{}", &rest[..spaces]));
            rest[spaces..].to_owned()
        };
        let without = without.as_ref().map(|text| body(Some(text)));
        let thinking = body(generation.as_ref());
        if let Some(spelled) = header_spelled.filter(|_| !assistant_prefix_given) {
            assistant[0] = spelled;
        }
        let without = match without {
            None => thinking.clone(),
            Some(text) if text.starts_with(thinking.trim_end()) => text,
            Some(text) => format!("{thinking}{text}"),
        };
        Ok(Self {
            bos: text("/chat/bos", &spec.bos)?,
            system: or(system, format.system),
            user: or(user, format.user),
            generation: format!("{}{thinking}", assistant[0]),
            generation_without_thinking: format!("{}{without}", assistant[0]),
            assistant,
        })
    }

    pub(super) fn render(&self, messages: &[Message], options: &RenderOptions) -> Result<String> {
        let mut prompt = self.bos.clone();
        for (index, message) in messages.iter().enumerate() {
            let [prefix, suffix] = match message.role.as_str() {
                "system" => &self.system,
                "user" => &self.user,
                "assistant" => &self.assistant,
                other => {
                    return Err(Error::new(
                        ErrorKind::Prompt,
                        format!("message {index}: role {other:?} is unknown"),
                    )
                    .hint("roles are system, user and assistant"));
                }
            };
            prompt.push_str(prefix);
            prompt.push_str(&message.content);
            prompt.push_str(suffix);
        }
        if options.add_generation_prompt {
            let thinks = options.enable_thinking != Some(false);
            let without = &self.generation_without_thinking;
            prompt.push_str(if thinks { &self.generation } else { without });
        }
        Ok(prompt)
    }
}

/// A marker as text.
fn spell(place: &str, marker: &Marker, tokenizer: Option<&Tokenizer>) -> Result<String> {
    let mut text = String::new();
    for piece in marker {
        match piece {
            Piece::Text(piece) => text.push_str(piece),
            Piece::Token(id) => match tokenizer.and_then(|t| t.id_to_token(*id)) {
                Some(token) => text.push_str(&token),
                None => {
                    let message = format!("manifest {place}: the tokenizer has no token {id}");
                    return Err(Error::new(ErrorKind::Manifest, message));
                }
            },
        }
    }
    Ok(text)
}
