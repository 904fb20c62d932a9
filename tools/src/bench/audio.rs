//! Speed of transcribing and speaking.

use std::time::Instant;

use qhx::Speaker;
use qhx::Transcriber;
use qhx_base::{CancelToken, Error, ErrorKind, Result, trace};
use qhx_core::engine::Model;
use qhx_media::Audio;
use serde::{Deserialize, Serialize};

use super::{BenchOptions, BenchReport, Measured, Spread};

/// Seconds of audio that are written down.
const SECONDS: u32 = 30;
/// Text that is spoken.
const TEXT: &str = "The boat leaves at noon, and whoever comes late waits for the next one.";

/// Length of a test's audio and its rate against real time.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct AudioRate {
    /// Length of the audio in seconds.
    pub seconds: f64,
    /// Its length over the time that it took, more than 1 where that is faster than real time.
    pub times_real_time: Spread,
}

/// Measures how fast a model writes down 30 s of noise, from its samples to text: `audio30`. At most
/// [`BenchOptions::tokens`] are written for what the model takes at once, the likeliest, whatever they are; of a model
/// that is not asked token by token, as many as it finds. What encoder and decoder take is in [`BenchReport::graphs`].
///
/// # Errors
/// When the model fails or is cancelled.
pub fn transcribe(transcriber: &mut Transcriber, options: &BenchOptions) -> Result<BenchReport> {
    let rate = transcriber.model().media_rules().audio.rate;
    let audio = Audio { samples: noise(rate as usize * SECONDS as usize), rate };
    let most = options.tokens.max(1);
    let turn = |transcriber: &mut Transcriber| {
        let transcript = transcriber.transcribe_whatever(audio.clone(), most)?;
        if transcript.cancelled {
            return Err(Error::new(ErrorKind::Cancelled, "cancelled"));
        }
        Ok((transcript.chunks.iter().map(|chunk| chunk.ids.len()).sum(), transcript.seconds))
    };
    turns(transcriber, &format!("audio{SECONDS}"), options, Transcriber::model, turn)
}

/// Measures how fast a voice says a sentence, from the text to samples: `speak`, with the first voice.
///
/// # Errors
/// When the model fails or is cancelled.
pub fn speak(speaker: &mut Speaker, options: &BenchOptions) -> Result<BenchReport> {
    let turn = |speaker: &mut Speaker| {
        let spoken = speaker.speak_with(TEXT, &<_>::default(), &CancelToken::new(), |_| Ok(()))?;
        if spoken.cancelled {
            return Err(Error::new(ErrorKind::Cancelled, "cancelled"));
        }
        Ok((0, spoken.seconds))
    };
    turns(speaker, "speak", options, Speaker::model, turn)
}

/// Measures a test that gives its tokens and seconds of audio, after once unmeasured.
fn turns<T>(
    model: &mut T,
    name: &str,
    options: &BenchOptions,
    of: fn(&T) -> &Model,
    mut turn: impl FnMut(&mut T) -> Result<(usize, f64)>,
) -> Result<BenchReport> {
    turn(model)?;
    let before = of(model).graph_stats();
    let (mut took, mut tokens, mut audio) = (Vec::new(), 0, 0.0);
    for _ in 0..options.repeat {
        let trace = of(model).trace().cloned();
        let _span = trace::span(trace.as_ref(), name.to_owned());
        let start = Instant::now();
        (tokens, audio) = turn(model)?;
        took.push(start.elapsed().as_secs_f64().max(1e-9));
    }
    let result = Measured {
        name: name.to_owned(),
        tokens,
        ms: Spread::of(took.iter().map(|s| s * 1e3)),
        tokens_per_second: Spread::of(took.iter().map(|s| tokens as f64 / s)),
        audio: Some(AudioRate {
            seconds: audio,
            times_real_time: Spread::of(took.iter().map(|s| audio / s)),
        }),
        speculated: None,
        ratio: None,
    };
    Ok(BenchReport::of(of(model), options.repeat, vec![result], &before))
}

/// White noise of a tenth of the full scale, the same each time.
fn noise(samples: usize) -> Vec<f32> {
    let mut state = 1_u32;
    let mut next = || {
        // Numerical Recipes' generator, whose high bits are random enough.
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    std::iter::repeat_with(|| next() * 0.1).take(samples).collect()
}
