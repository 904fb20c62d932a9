//! What consumes the tokens of answers, where the NPU consumes prompts.

use std::sync::Arc;

use qhx_core::engine::Model;
use qhx_core::op::Task;
use qhx_core::{Error, ErrorKind, Result, trace};
use serde::{Deserialize, Serialize};

use crate::backends::forms;
use crate::bench::{behind, token_ms};
use crate::cache;
use crate::settings::{DecodeOn, Settings};

/// The CPU takes tokens if it needs less than this share of the NPU's time: the NPU takes less energy, and the state
/// stays there.
const SHARE: f64 = 0.95;

/// What a token takes, in milliseconds, behind so many positions.
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
                let message = format!("{path}: tokens on the NPU: backend {name} runs the bundle");
                return Err(Error::new(ErrorKind::Runtime, message)
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
