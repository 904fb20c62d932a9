//! Rates by context length: tables that several machines and programs add theirs to.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;
use std::time::Instant;

use qhx::{positions, varied_tokens};
use qhx_base::escape::escaped;
use qhx_base::{Error, ErrorKind, Result, files, hash};
use qhx_core::engine::Model;
use qhx_core::op::{Segment, Task};
use serde_json::Value;

use super::rows::{BenchTable, PartTime, Rate, TableRow};
use super::{
    BenchOptions, BenchReport, EnergyMeter, GraphTime, MAX_REPORT, Spread, executed, millis,
    peak_memory, published,
};

/// Required value of [`BenchTable::schema`].
const SCHEMA: &str = "qhx-bench-table-1";
/// Lengths of a large context before it is doubled, where doubling begins, and the last one where a context has no end.
const SHORT: [usize; 2] = [128, 512];
const FIRST: usize = 1024;
const LAST: usize = 32_768;
/// Tables of a file, rows of a table, bytes of a text in it.
const MAX_TABLES: usize = 100;
const MAX_ROWS: usize = 100;
const MAX_TEXT: usize = 400;
/// Positions, and tokens a second, that nothing reaches.
const MAX_CONTEXT: usize = 1 << 30;
const MAX_RATE: f64 = 1e9;

/// Context lengths at which a model that takes `max` positions is measured: 128, 512, 1024, 2048, 4096 … and `max`
/// itself; of less than 4096 a quarter, a half and all. 0 is a context without an end.
pub fn contexts(max: usize) -> Vec<usize> {
    let max = if max == 0 { LAST } else { max };
    let first = FIRST.min(max / 4).max(1);
    let short = SHORT.into_iter().filter(|_| first == FIRST);
    let doubled = std::iter::successors(Some(first), |length| length.checked_mul(2));
    let mut lengths: Vec<_> = short.chain(doubled.take_while(|length| *length < max)).collect();
    lengths.push(max);
    lengths
}

/// One measurement.
#[derive(Debug, Clone, Copy)]
struct Sample {
    seconds: f64,
    joules: Option<f64>,
}

/// The measurements up to one context length.
#[derive(Debug)]
struct Length {
    prompt: usize,
    tokens: usize,
    prefill: Vec<Sample>,
    decode: Vec<Sample>,
    hand_overs: Vec<f64>,
}

impl BenchTable {
    /// Measures a model at the lengths of [`BenchOptions::prompts`], or of [`contexts`] where there are none. At each
    /// the last [`BenchOptions::tokens`] positions, of half the length at most, are tokens of an answer, and what is
    /// before them is a prompt. Tokens are the same in each run; sampling and the tokenizer are no part of it.
    ///
    /// # Errors
    /// When a length is 0 or more than the context holds, when the model does not generate, fails or is cancelled, and
    /// where its logits are not numbers.
    pub fn measure(
        model: &mut Model,
        options: &BenchOptions,
        energy: Option<&EnergyMeter>,
    ) -> Result<Self> {
        options.check_within(positions(model))?;
        model.require(Task::Generate, "generate")?;
        let asked = &options.prompts;
        let lengths = if asked.is_empty() { contexts(model.info().max_ctx) } else { asked.clone() };
        let longest = lengths.iter().max().copied().unwrap_or(1);
        let all = varied_tokens(model, longest);
        let of = |context: usize| {
            let tokens = options.tokens.min(context / 2);
            let (prefill, decode, hand_overs) = (Vec::new(), Vec::new(), Vec::new());
            Length { prompt: context - tokens, tokens, prefill, decode, hand_overs }
        };
        let mut lengths: Vec<_> = lengths.into_iter().map(of).collect();
        let mut before = Vec::new();
        for turn in 0..=options.repeat {
            if turn == 1 {
                before = model.graph_stats();
            }
            // In turns, so that a device that becomes warm slows all of them.
            for length in &mut lengths {
                length.take_turn(model, &all, energy, turn > 0)?;
            }
        }
        let rows: Vec<_> = lengths.iter().map(Length::row).collect();
        let mut rates = rows.iter().flat_map(|row| [row.prefill, row.decode]).flatten();
        let has_energy = rates.any(|rate| rate.joules_per_token.is_some());
        let graphs = executed(&model.graph_stats(), &before);
        Ok(Self {
            energy: energy.filter(|_| has_energy).map(|meter| meter.name().to_owned()),
            rows,
            ..Self::of(model, options.repeat, &graphs)?
        })
    }

    /// Times of the graphs in a report on a model, of those that have no context to fill: encoders, recognisers, voices.
    ///
    /// # Errors
    /// When the model's manifest cannot be read.
    pub fn of_report(model: &Model, report: &BenchReport) -> Result<Self> {
        Self::of(model, report.repeat, &report.graphs)
    }

    /// A table of a model without rows.
    fn of(model: &Model, repeat: u16, graphs: &[GraphTime]) -> Result<Self> {
        let manifest = model.manifest();
        let (kind, path) = (ErrorKind::Manifest, &manifest.path);
        let sha256 = hash::sha256(kind, path, files::open(kind, path)?, |_| Ok(()))?;
        let precision = manifest.model.rest.get("precision").and_then(Value::as_str);
        let backend = model.backend();
        Ok(Self {
            schema: SCHEMA.to_owned(),
            model: manifest.model.name.clone(),
            manifest_sha256: Some(sha256),
            precision: precision.map(str::to_owned),
            device: model.device().or_else(processor),
            chip: published::chip(model),
            backend: backend.label(),
            library: Some(backend.version.clone()),
            decoder: model.decoder().map(|decoder| decoder.backend.label()),
            qhx: Some(env!("CARGO_PKG_VERSION").to_owned()),
            source: None,
            energy: None,
            repeat: Some(repeat),
            load_ms: Some(millis(model.load_time())),
            peak_memory_bytes: peak_memory(),
            rows: Vec::new(),
            parts: published::parts(model, graphs),
        })
    }

    /// Reads a file with a table, or with a list of them.
    ///
    /// # Errors
    /// When the file cannot be read, is no table of this schema, or has figures that cannot be.
    pub fn read(path: &Path) -> Result<Vec<Self>> {
        let kind = ErrorKind::Artifact;
        let text = files::read_text(kind, path, MAX_REPORT)?;
        Self::parse(&path.display().to_string(), &text)
    }

    /// Same as [`BenchTable::read`], of a text.
    pub(super) fn parse(name: &str, text: &str) -> Result<Vec<Self>> {
        let kind = ErrorKind::Artifact;
        let wrong = |why: String| {
            Error::new(kind, format!("{name}: {why}"))
                .hint("expected what `qhx bench BUNDLE --table --json` printed, or a list of such")
        };
        let value: Value = serde_json::from_str(text).map_err(|e| wrong(e.to_string()))?;
        let values = match value {
            Value::Array(values) => values,
            one => vec![one],
        };
        let count = values.len();
        if !(1..=MAX_TABLES).contains(&count) {
            return Err(wrong(format!("found {count} tables, expected 1 to {MAX_TABLES}")));
        }
        let table = |value| -> Result<Self> {
            let table: Self = serde_json::from_value(value).map_err(|e| wrong(e.to_string()))?;
            table.check().map_err(&wrong)?;
            Ok(table)
        };
        values.into_iter().map(table).collect()
    }

    /// Says what of it cannot be.
    fn check(&self) -> std::result::Result<(), String> {
        if self.schema != SCHEMA {
            return Err(format!("found schema {:?}, expected {SCHEMA:?}", self.schema));
        }
        let named = [("model", Some(&self.model)), ("backend", Some(&self.backend))];
        let others = [
            ("manifest_sha256", &self.manifest_sha256),
            ("precision", &self.precision),
            ("device", &self.device),
            ("chip", &self.chip),
            ("library", &self.library),
            ("decoder", &self.decoder),
            ("qhx", &self.qhx),
            ("source", &self.source),
            ("energy", &self.energy),
        ];
        let texts = named.into_iter().chain(others.map(|(key, text)| (key, text.as_ref())));
        for (key, bytes) in texts.map(|(key, text)| (key, text.map_or(0, String::len))) {
            if bytes > MAX_TEXT {
                return Err(format!("{key} has {bytes} bytes, expected at most {MAX_TEXT}"));
            }
        }
        let count = self.rows.len();
        let least = usize::from(self.parts.is_empty());
        if !(least..=MAX_ROWS).contains(&count) {
            return Err(format!("found {count} rows, expected {least} to {MAX_ROWS}"));
        }
        let count = self.parts.len();
        if count > MAX_ROWS {
            return Err(format!("found {count} parts, expected at most {MAX_ROWS}"));
        }
        for PartTime { part, ms, estimate_ms } in &self.parts {
            let times = [Some(*ms), *estimate_ms];
            let wrong = times.into_iter().flatten().find(|ms| !(0.0..=MAX_RATE).contains(ms));
            if let Some(ms) = wrong {
                return Err(format!("a part takes {ms} ms, expected 0 to {MAX_RATE}"));
            }
            if part.len() > MAX_TEXT {
                return Err(format!(
                    "a part's name has {} bytes, expected at most {MAX_TEXT}",
                    part.len()
                ));
            }
        }
        for TableRow { context, prefill, decode, .. } in &self.rows {
            if !(1..=MAX_CONTEXT).contains(context) {
                return Err(format!("context {context}, expected 1 to {MAX_CONTEXT}"));
            }
            for rate in [prefill, decode].into_iter().flatten() {
                let found = rate.tokens_per_second;
                if !(found > 0.0 && found <= MAX_RATE) {
                    return Err(format!(
                        "context {context}: {found} tokens a second, expected more than 0 and at most {MAX_RATE}"
                    ));
                }
            }
        }
        Ok(())
    }

    /// Label that tells it apart from others: model, precision, program, device.
    pub fn label(&self) -> String {
        let mut label = self.model.clone();
        if let Some(precision) = &self.precision {
            label = format!("{label} {precision}");
        }
        label = format!("{label}, {}", self.backend);
        if let Some(decoder) = self.decoder.as_ref().filter(|decoder| **decoder != self.backend) {
            label = format!("{label} and {decoder}");
        }
        self.device.as_ref().map_or_else(|| label.clone(), |device| format!("{label}, {device}"))
    }

    /// Several as one table in Markdown, a line for each of their rows; energy where any has it. Behind it one of their
    /// parts, where any has those.
    pub fn markdown(tables: &[Self]) -> String {
        let rows =
            || tables.iter().flat_map(|table| table.rows.iter().map(move |row| (table, row)));
        let joules = |rate: Option<Rate>| rate.and_then(|rate| rate.joules_per_token);
        let energy =
            rows().any(|(_, row)| joules(row.prefill).or_else(|| joules(row.decode)).is_some());
        let mut head = "| | context | prompt, tokens/s | decode, tokens/s |".to_owned();
        let mut line = "|---|---|---|---|".to_owned();
        if energy {
            head.push_str(" prompt, J/token | decode, J/token |");
            line.push_str("---|---|");
        }
        let mut out = format!("{head}\n{line}\n");
        for (table, row) in rows() {
            let label = table.label().replace('|', "\\|");
            let rate = |rate: Option<Rate>| rate.map_or_else(String::new, |rate| rate.text());
            let (prefill, decode) = (rate(row.prefill), rate(row.decode));
            out.push_str(&format!(
                "| {} | {} | {prefill} | {decode} |",
                escaped(&label),
                row.context
            ));
            if energy {
                for rate in [row.prefill, row.decode] {
                    let text =
                        joules(rate).map_or_else(String::new, |joules| format!("{joules:.4}"));
                    out.push_str(&format!(" {text} |"));
                }
            }
            out.push('\n');
        }
        if rows().next().is_none() {
            out.clear();
        }
        let mut parts =
            tables.iter().flat_map(|table| table.parts.iter().map(move |part| (table, part)));
        if let Some(first) = parts.next() {
            out.push_str(if out.is_empty() { "" } else { "\n" });
            out.push_str("| | one execution | ms |\n|---|---|---|\n");
            for (table, PartTime { part, ms, .. }) in std::iter::once(first).chain(parts) {
                let label =
                    format!("{} | {}", table.label().replace('|', "\\|"), part.replace('|', "\\|"));
                out.push_str(&format!("| {} | {ms:.3} |\n", escaped(&label)));
            }
        }
        out
    }
}

impl Rate {
    fn of(tokens: usize, samples: &[Sample]) -> Option<Self> {
        if tokens == 0 || samples.is_empty() {
            return None;
        }
        let Spread { mean, sd } =
            Spread::of(samples.iter().map(|sample| tokens as f64 / sample.seconds.max(1e-9)));
        let joules: Option<Vec<f64>> = samples.iter().map(|sample| sample.joules).collect();
        let all = (tokens * samples.len()) as f64;
        let joules_per_token = joules.map(|joules| joules.iter().sum::<f64>() / all);
        Some(Self { tokens: Some(tokens), tokens_per_second: mean, sd: Some(sd), joules_per_token })
    }

    fn text(&self) -> String {
        let spread = self.sd.map_or_else(String::new, |sd| format!(" ± {sd:.2}"));
        format!("{:.2}{spread}", self.tokens_per_second)
    }
}

impl Length {
    fn take_turn(
        &mut self,
        model: &mut Model,
        tokens: &[u32],
        energy: Option<&EnergyMeter>,
        counts: bool,
    ) -> Result<()> {
        model.reset()?;
        let (prompt, rest) = tokens.split_at_checked(self.prompt).unwrap_or((tokens, &[]));
        let answer = rest.get(..self.tokens).unwrap_or(rest);
        let op = model.op_mut();
        let prefill = Sample::of(energy, || op.prefill(&[Segment::Tokens(prompt)]))?;
        // Where logits are not numbers, the time means nothing.
        qhx_core::sampling::argmax(op.logits()?)?;
        let before = op.hand_overs();
        let mut decode =
            Sample::of(energy, || answer.iter().try_for_each(|&token| op.decode(token)))?;
        qhx_core::sampling::argmax(op.logits()?)?;
        let moved = op.hand_overs().since(before);
        decode.seconds -= moved.busy.as_secs_f64();
        if counts {
            self.prefill.push(prefill);
            self.decode.push(decode);
            if moved.count > 0 {
                self.hand_overs.push(millis(moved.busy));
            }
        }
        Ok(())
    }

    fn row(&self) -> TableRow {
        let moved = &self.hand_overs;
        TableRow {
            context: self.prompt + self.tokens,
            prefill: Rate::of(self.prompt, &self.prefill),
            decode: Rate::of(self.tokens, &self.decode),
            hand_over_ms: (!moved.is_empty()).then(|| Spread::of(moved.iter().copied()).mean),
        }
    }
}

impl Sample {
    fn of(energy: Option<&EnergyMeter>, work: impl FnOnce() -> Result<()>) -> Result<Self> {
        let timed = || {
            let start = Instant::now();
            work().map(|()| start.elapsed().as_secs_f64())
        };
        let (seconds, joules) = match energy {
            Some(meter) => meter.measure(timed),
            None => (timed(), None),
        };
        Ok(Self { seconds: seconds?, joules })
    }
}

/// The processor's name, where the system has it, or its architecture.
fn processor() -> Option<String> {
    let mut text = String::new();
    let read =
        File::open("/proc/cpuinfo").and_then(|file| file.take(1 << 16).read_to_string(&mut text));
    let name = text.lines().filter(|_| read.is_ok()).find_map(|line| {
        let (key, value) = line.split_once(':')?;
        ["model name", "Hardware"].contains(&key.trim()).then(|| value.trim().to_owned())
    });
    name.filter(|name| !name.is_empty()).or_else(|| Some(std::env::consts::ARCH.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contexts_double_up_to_the_whole_one() {
        assert_eq!(contexts(4096), [128, 512, 1024, 2048, 4096]);
        assert_eq!(contexts(5000), [128, 512, 1024, 2048, 4096, 5000]);
        assert_eq!(contexts(192), [48, 96, 192]);
        assert_eq!(contexts(1), [1]);
        assert_eq!(contexts(0).last(), Some(&LAST));
    }
}
