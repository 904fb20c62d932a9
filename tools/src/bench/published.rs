//! Figures that others published, beside those of this device.

use std::collections::BTreeMap;

use qhx_base::Result;
use qhx_base::escape::escaped;
use qhx_core::engine::Model;
use qhx_qnn::SOCS;

use super::rows::{BenchTable, PartTime};
use super::{GraphTime, Rate};

/// The files of `benches/published`: tables whose sources they name.
const FILES: [(&str, &str); 4] = [
    ("ai_hub.json", include_str!("../../../benches/published/ai_hub.json")),
    ("genie.json", include_str!("../../../benches/published/genie.json")),
    ("geniex.json", include_str!("../../../benches/published/geniex.json")),
    ("qhexrt.json", include_str!("../../../benches/published/qhexrt.json")),
];

/// A figure that several may have.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Figure {
    /// A prompt of this number of tokens.
    Prompt(usize),
    /// A token at this number of positions.
    Decode(usize),
    /// One execution of a part of the model.
    Part(String),
}

/// Content of each column of a figure.
#[derive(Debug, Default)]
struct Cells {
    here: String,
    published: Vec<String>,
    estimate: String,
}

/// All figures that are compiled into the program.
///
/// # Errors
/// Never, while the files are tables.
pub fn published() -> Result<Vec<BenchTable>> {
    let tables = FILES.map(|(name, text)| BenchTable::parse(name, text));
    Ok(tables.into_iter().collect::<Result<Vec<_>>>()?.concat())
}

impl BenchTable {
    /// Its figures beside those that others published for the same model, and beside the estimates of its bundle, as
    /// Markdown: of the same chip and precision where there are any, or else of all.
    ///
    /// # Errors
    /// Same as [`published`].
    pub fn beside_published(&self) -> Result<String> {
        let mut others: Vec<_> = published()?
            .into_iter()
            .filter(|other| same_model(&self.model, &other.model))
            .collect();
        prefer(&mut others, |other| other.chip.is_some() && other.chip == self.chip);
        prefer(&mut others, |other| other.precision == self.precision);
        let mut figures: BTreeMap<Figure, Cells> = BTreeMap::new();
        for (figure, text) in self.figures() {
            figures.entry(figure).or_default().here = text;
        }
        for part in self.parts.iter().filter_map(|part| Some((part, part.estimate_ms?))) {
            let figure = Figure::Part(part.0.part.clone());
            figures.entry(figure).or_default().estimate = format!("{:.3} ms", part.1);
        }
        for other in &others {
            let names = [Some(&other.backend), other.device.as_ref(), other.precision.as_ref()];
            let who =
                names.into_iter().flatten().map(String::as_str).collect::<Vec<_>>().join(", ");
            for (figure, text) in other.figures() {
                let text = format!("{text} ({who})");
                figures.entry(figure).or_default().published.push(text);
            }
        }
        Ok(self.lines(&figures, &others))
    }

    fn lines(&self, figures: &BTreeMap<Figure, Cells>, others: &[Self]) -> String {
        let mut out = String::new();
        if self.chip.is_none() {
            out.push_str(
                "This is not a device: rates here say nothing about the NPU. On a device the same command compares.\n\n",
            );
        }
        if others.is_empty() {
            out.push_str("No figures for this model are published that this program knows of.\n\n");
        }
        out.push_str("| | here | published | estimate |\n|---|---|---|---|\n");
        for (figure, Cells { here, published, estimate }) in figures {
            let what = match figure {
                Figure::Prompt(tokens) => format!("prompt of {tokens} tokens"),
                Figure::Decode(context) => format!("a token at up to {context} positions"),
                Figure::Part(part) => format!("one execution: {part}"),
            };
            let cell = |text: &str| escaped(text).replace('|', "\\|");
            let published = published.join("; ");
            out.push_str(&format!(
                "| {} | {} | {} | {} |\n",
                cell(&what),
                cell(here),
                cell(&published),
                cell(estimate)
            ));
        }
        let mut sources: Vec<_> = others.iter().filter_map(|other| other.source.clone()).collect();
        sources.dedup();
        for source in sources {
            out.push_str(&format!("\n- {source}"));
        }
        if !others.is_empty() {
            out.push('\n');
        }
        out
    }

    /// Its figures as texts.
    fn figures(&self) -> Vec<(Figure, String)> {
        let mut found = Vec::new();
        for row in &self.rows {
            if let Some(rate) = &row.prefill {
                let tokens = rate.tokens.unwrap_or(row.context);
                let first = tokens as f64 / rate.tokens_per_second * 1e3;
                let text = format!("{}, first token after {first:.1} ms", per_second(rate));
                found.push((Figure::Prompt(tokens), text));
            }
            if let Some(rate) = &row.decode {
                found.push((Figure::Decode(row.context), per_second(rate)));
            }
        }
        let ms = |ms: f64| format!("{ms:.3} ms");
        let parts = self.parts.iter();
        found.extend(parts.map(|part| (Figure::Part(part.part.clone()), ms(part.ms))));
        found
    }
}

fn per_second(rate: &Rate) -> String {
    format!("{:.2} tokens/s", rate.tokens_per_second)
}

/// Leaves those for which something holds, if it holds for any.
fn prefer(tables: &mut Vec<BenchTable>, holds: impl Fn(&BenchTable) -> bool) {
    if tables.iter().any(&holds) {
        tables.retain(holds);
    }
}

/// True if a bundle's name, such as `Llama-3.2-1B-Instruct`, has all of a published one, `Llama-3.2-1B`.
fn same_model(bundle: &str, published: &str) -> bool {
    let plain = |name: &str| {
        let letters = name.chars().filter(char::is_ascii_alphanumeric);
        letters.map(|c| c.to_ascii_lowercase()).collect::<String>()
    };
    plain(bundle).contains(&plain(published))
}

/// The chip that executes a model's graphs, by its name where it has one; none where something else does.
pub(super) fn chip(model: &Model) -> Option<String> {
    let device = model.device().filter(|_| !model.is_emulated())?;
    let number = device.rsplit_once("soc ").and_then(|(_, number)| number.parse().ok());
    let known = SOCS.iter().find(|soc| Some(soc.target.soc) == number);
    Some(known.map_or(device, |soc| soc.name.to_owned()))
}

/// Times of a model's graphs, with the estimates of its bundle. Encoder, decoder and head have the names under which
/// they are published; the last two are a step together.
pub(super) fn parts(model: &Model, graphs: &[GraphTime]) -> Vec<PartTime> {
    let contexts = &model.manifest().artifacts.contexts;
    let estimate = |graph: &GraphTime| {
        let context = contexts.iter().find(|context| context.key == graph.context)?;
        let us = context.us.iter().find(|(name, _)| *name == graph.graph)?.1;
        Some(us / 1e3)
    };
    let name = |graph: &str| match graph {
        "enc" | "encoder" => "encoder".to_owned(),
        "decode" => "decoder".to_owned(),
        "lmhead" => "head".to_owned(),
        "vision" => "tower".to_owned(),
        other => other.to_owned(),
    };
    let time = |graph: &GraphTime| {
        let estimate_ms = estimate(graph);
        PartTime { part: name(&graph.graph), ms: graph.mean_ms, estimate_ms }
    };
    let mut parts: Vec<_> = graphs.iter().map(time).collect();
    let part = |name: &str| parts.iter().find(|part| part.part == name);
    if let (Some(decoder), Some(head)) = (part("decoder"), part("head")) {
        let estimates = decoder.estimate_ms.zip(head.estimate_ms);
        let step = PartTime {
            part: "decoder and head".to_owned(),
            ms: decoder.ms + head.ms,
            estimate_ms: estimates.map(|(decoder, head)| decoder + head),
        };
        parts.push(step);
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_published_figure_has_a_source_and_a_chip() {
        let tables = published().unwrap();
        assert!(tables.len() > 50, "{}", tables.len());
        for table in &tables {
            assert!(table.source.is_some() && table.precision.is_some(), "{table:?}");
            let chip = table.chip.as_deref();
            assert!(SOCS.iter().any(|soc| Some(soc.name) == chip), "{table:?}");
        }
    }

    /// Same as on a device: figures of the same chip and precision only.
    #[test]
    fn a_device_is_compared_with_the_same_chip() {
        let mine = r#"{"schema": "qhx-bench-table-1", "model": "Llama-3.2-1B-Instruct", "precision": "w4a16",
            "chip": "SM8750", "backend": "qnn", "parts": [{"part": "decoder", "ms": 9.5, "estimate_ms": 9.0}],
            "rows": [{"context": 128, "prefill": {"tokens": 128, "tokens_per_second": 2560.0}},
                     {"context": 4096, "decode": {"tokens_per_second": 70.0}}]}"#;
        let mine = BenchTable::parse("mine", mine).unwrap().remove(0);
        let text = mine.beside_published().unwrap();
        for line in [
            "| a token at up to 4096 positions | 70.00 tokens/s | 64.14 tokens/s (Genie, Snapdragon 8 Elite, w4a16) |  |",
            "| one execution: decoder | 9.500 ms |  | 9.000 ms |",
            "| prompt of 128 tokens | 2560.00 tokens/s, first token after 50.0 ms | 3234.8 tokens/s, first token after",
        ] {
            let line = line.replace("3234.8 ", "3234.80 ");
            assert!(text.contains(&line), "{line}: {text}");
        }
        assert!(text.contains("perf.yaml") && !text.contains("not a device"), "{text}");
        assert!(!text.contains("Gen 5") && !text.contains("X Elite"), "{text}");
        // Elsewhere all chips are shown, and that rates say nothing.
        let elsewhere = BenchTable { chip: None, ..mine }.beside_published().unwrap();
        assert!(elsewhere.starts_with("This is not a device"), "{elsewhere}");
        assert!(elsewhere.contains("Gen 5") && elsewhere.contains("X Elite"), "{elsewhere}");
    }
}
