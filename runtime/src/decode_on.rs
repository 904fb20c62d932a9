//! Choice of the backend that decodes when the NPU runs prefill.

use std::sync::Arc;
use std::time::{Duration, Instant};

use qhx_base::{Result, error, trace};
use qhx_core::engine::Model;
use qhx_core::op::{Segment, Task};
use serde::{Deserialize, Serialize};

use crate::backends::forms;
use crate::cache;
use crate::settings::{DecodeOn, Settings};

/// The CPU takes tokens if it needs less than this share of the NPU's time: the NPU takes less energy, and the state
/// stays there.
const SHARE: f64 = 0.95;

/// Time per token on each backend in milliseconds, after `behind` positions.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct Measured {
    npu: f64,
    cpu: f64,
    behind: usize,
}

impl Measured {
    fn cpu_wins(self) -> bool {
        self.cpu < SHARE * self.npu
    }

    fn reason(self, when: &str) -> String {
        let Self { npu, cpu, behind } = self;
        format!(
            "{when} with this bundle: {npu:.1} ms a token on the NPU, {cpu:.1} ms on the CPU, behind {behind} positions"
        )
    }
}

impl Settings {
    /// Has a model that is open decode where `on` asks for.
    ///
    /// # Errors
    /// When the NPU is asked for and does not run the bundle, when the CPU is asked for and the bundle has no graphs
    /// for it, and when a measurement fails.
    pub(crate) fn decode_on(&self, on: DecodeOn, model: &mut Model) -> Result<()> {
        if !model.op().description.tasks.contains(&Task::Generate) {
            return Ok(());
        }
        let name = model.backend().name.clone();
        let Some(device) = model.device() else {
            if on == DecodeOn::Npu {
                let path = model.manifest().path.display();
                return Err(error!(
                    Runtime,
                    "{path}: tokens on the NPU: backend {name} runs the bundle"
                )
                .hint("--backend qnn says why the NPU does not"));
            }
            return model.decode_on(None, format!("backend {name} consumes prompts, too"));
        };
        match on {
            DecodeOn::Npu => model.decode_on(None, "asked for"),
            DecodeOn::Cpu => model.decode_on(Some(self.cpu_backend()?), "asked for"),
            DecodeOn::Auto if !forms(model.manifest())?.1 => {
                model.decode_on(None, "the bundle has no ONNX graphs for the CPU")
            }
            DecodeOn::Auto => self.decode_on_the_faster(&device, model),
        }
    }

    fn decode_on_the_faster(&self, device: &str, model: &mut Model) -> Result<()> {
        let behind = behind(model);
        let (cpu, power) = (self.cpu_options(), &self.device.power);
        let conditions = format!("{cpu:?} {power:?} {behind}");
        let file = cache::of_model("decode-on", model, &[device, &conditions]);
        let known = file.as_ref().and_then(|file| std::fs::read(file).ok());
        let known = known.and_then(|bytes| serde_json::from_slice::<Measured>(&bytes).ok());
        if let Some(measured) = known {
            let backend = measured.cpu_wins().then(|| self.cpu_backend()).transpose()?;
            return model.decode_on(backend, measured.reason("measured earlier"));
        }
        let trace = model.trace().cloned();
        let span = trace::span(trace.as_ref(), "measure tokens");
        let (npu, behind) = token_ms(model, behind, true)?;
        let backend = self.cpu_backend()?;
        model.decode_on(Some(Arc::clone(&backend)), "measured")?;
        let (cpu, behind) = token_ms(model, behind, false)?;
        let measured = Measured { npu, cpu, behind };
        drop(span);
        let reason = measured.reason("measured now");
        model.decode_on(measured.cpu_wins().then_some(backend), reason)?;
        model.forget_counts();
        let json = serde_json::to_vec(&measured);
        if let (Some(file), Ok(json)) = (file, json)
            && let Err(e) = cache::remember(&file, &json)
        {
            tracing::debug!("{}: not remembered: {e}", file.display());
        }
        Ok(())
    }
}

/// Positions of a model's context; without an end where it declares none.
pub fn positions(model: &Model) -> usize {
    if model.info().max_ctx == 0 { usize::MAX } else { model.info().max_ctx }
}

/// Tokens that the model takes, the same in each run: none that stands for an image or audio.
pub fn varied_tokens(model: &mut Model, count: usize) -> Vec<u32> {
    let (vocab, op) = (model.info().vocab, model.op_mut());
    let vocab = match op.info().input_vocab {
        0 => vocab,
        rows => rows,
    };
    let vocab = u32::try_from(vocab.max(1)).unwrap_or(u32::MAX);
    let placeholders = op.info().placeholders.clone();
    // A prime step, so that texts of any length vary.
    let all = (0..u32::MAX).map(|i| i.wrapping_mul(7919).wrapping_add(17) % vocab);
    all.filter(|token| !placeholders.contains(token)).take(count).collect()
}

/// The most positions before the tokens of [`token_ms`]: a prompt that an NPU consumes within seconds.
const BEHIND: usize = 4096;
/// Tokens of [`token_ms`] that are measured.
const STEPS: usize = 9;
/// Positions before the tokens of [`token_ms`] that are consumed at a time.
const PIECE: usize = 128;
/// When [`token_ms`] takes no more positions, and no more tokens: an emulator needs minutes for what takes an NPU
/// seconds.
const ENOUGH: Duration = Duration::from_secs(10);

/// Positions before the tokens of [`token_ms`]: half of the context, as a token costs more the further it stands.
fn behind(model: &Model) -> usize {
    let max = positions(model);
    (max / 2).min(max.saturating_sub(STEPS + 1)).clamp(1, BEHIND)
}

/// Median of the milliseconds that a model takes for a token behind at most `behind` positions, and the positions that
/// it was measured behind: where `limited`, those that were consumed until [`ENOUGH`].
fn token_ms(model: &mut Model, behind: usize, limited: bool) -> Result<(f64, usize)> {
    let tokens = varied_tokens(model, behind + 1 + STEPS);
    let (text, rest) = tokens.split_at(behind);
    model.reset()?;
    let op = model.op_mut();
    let start = Instant::now();
    let mut consumed = 0;
    for piece in text.chunks(PIECE) {
        op.prefill(&[Segment::Tokens(piece)])?;
        consumed += piece.len();
        if limited && start.elapsed() > ENOUGH {
            break;
        }
    }
    let mut times = Vec::with_capacity(rest.len());
    let all = Instant::now();
    for &token in rest {
        let start = Instant::now();
        op.decode(token)?;
        qhx_core::sampling::argmax(op.logits()?)?;
        times.push(start.elapsed().as_secs_f64() * 1e3);
        // The first takes the state over, and touches memory for the first time.
        if times.len() > 1 && all.elapsed() > ENOUGH {
            break;
        }
    }
    model.reset()?;
    let measured = times.get_mut(1..).unwrap_or_default();
    measured.sort_by(f64::total_cmp);
    Ok((measured.get(measured.len() / 2).copied().unwrap_or_default(), consumed))
}
