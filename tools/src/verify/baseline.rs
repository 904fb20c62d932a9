//! Figures of a bundle beside those of a baseline that a repository keeps: sizes, what the weights cost the model's
//! predictions, the compiler's estimates, and golden steps.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;
use std::str::FromStr;

use qhx::golden::GoldenReport;
use qhx_base::{Error, ErrorKind, Result, error, files};
use qhx_core::Manifest;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The schema that is read and written.
pub const BASELINE_SCHEMA: &str = "qhx_baseline/v1";

/// Longest baseline that is read.
const MAX_BYTES: u64 = 16 << 20;

/// Kind of a figure: the part of its name before the first dot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum FigureKind {
    /// Bytes of all files of the bundle, and of its weights.
    Size,
    /// Divergence from f16 weights, in nats.
    Kl,
    /// Perplexity of texts.
    Perplexity,
    /// Share of positions with the same likeliest token as f16 weights.
    Agreement,
    /// Factor by which the largest value could grow and still fit f16.
    Headroom,
    /// Microseconds of a token, and of one execution of each graph, by the compiler's estimate.
    Time,
    /// Smallest cosine of the answers of a golden step.
    Golden,
}

impl FigureKind {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::Size,
        Self::Kl,
        Self::Perplexity,
        Self::Agreement,
        Self::Headroom,
        Self::Time,
        Self::Golden,
    ];

    /// Name in figures and options.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Size => "size",
            Self::Kl => "kl",
            Self::Perplexity => "perplexity",
            Self::Agreement => "agreement",
            Self::Headroom => "headroom",
            Self::Time => "time",
            Self::Golden => "golden",
        }
    }

    /// Kind of the figure of this name.
    fn of(figure: &str) -> Option<Self> {
        let kind = figure.split('.').next();
        Self::ALL.into_iter().find(|known| Some(known.name()) == kind)
    }

    const fn larger_is_better(self) -> bool {
        matches!(self, Self::Agreement | Self::Headroom | Self::Golden)
    }

    /// Tolerance unless another one is given.
    const fn tolerance(self) -> Tolerance {
        let (part, amount) = match self {
            Self::Size => (0.01, 0.0),
            Self::Kl => (0.1, 1e-4),
            Self::Perplexity => (0.02, 0.0),
            Self::Agreement => (0.0, 0.02),
            Self::Headroom => (0.2, 0.0),
            Self::Time => (0.05, 0.0),
            Self::Golden => (0.0, 0.001),
        };
        Tolerance { part, amount }
    }

    /// Reason why a bundle lacks such figures, as a hint.
    const fn missing(self) -> &'static str {
        match self {
            Self::Size => "the manifest lists no lengths of files",
            Self::Kl | Self::Perplexity | Self::Agreement | Self::Headroom => {
                "it was forged without a receipt: leave out --no-measure"
            }
            Self::Time => "it was forged without an estimate: give --estimate",
            Self::Golden => "no golden step of that name ran",
        }
    }

    /// Value for people.
    fn shown(self, value: f64) -> String {
        match self {
            Self::Size => format!("{value:.0} bytes"),
            Self::Kl => format!("{value:.2e} nats"),
            Self::Perplexity => format!("{value:.4}"),
            Self::Agreement => format!("{:.1} %", value * 100.0),
            Self::Headroom => format!("{value:.1} times"),
            Self::Time if value >= 1000.0 => format!("{:.2} ms", value / 1000.0),
            Self::Time => format!("{value:.1} µs"),
            Self::Golden => format!("{value:.6}"),
        }
    }
}

/// Change for the worse that a figure may take: the larger of a part of the baseline's value, and an amount.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Tolerance {
    part: f64,
    amount: f64,
}

impl Tolerance {
    fn of(self, value: f64) -> f64 {
        (self.part * value.abs()).max(self.amount)
    }

    fn shown(self, kind: FigureKind, value: f64) -> String {
        if self.part * value.abs() >= self.amount && self.part > 0.0 {
            return format!("{} %", round(self.part * 100.0));
        }
        match kind {
            FigureKind::Agreement => format!("{} points", round(self.amount * 100.0)),
            _ => round(self.amount).to_string(),
        }
    }
}

/// Six digits behind the point at most, so that products of decimal fractions look like them.
fn round(value: f64) -> f64 {
    (value * 1e6).round() / 1e6
}

/// Tolerance of a figure or of a kind of figures, by its name: `time=3%`, `kl.code=0.01`.
#[derive(Debug, Clone, PartialEq)]
pub struct ToleranceOf {
    name: String,
    tolerance: Tolerance,
}

impl FromStr for ToleranceOf {
    type Err = String;

    /// `NAME=N%`, a part of the baseline's value, or `NAME=N`, an amount.
    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let expected = || "expected NAME=N% or NAME=N, such as time=3% or kl.code=0.01".to_owned();
        let (name, value) = text.split_once('=').ok_or_else(expected)?;
        let (number, percent) = match value.strip_suffix('%') {
            Some(number) => (number, true),
            None => (value, false),
        };
        let number: f64 = number.trim().parse().map_err(|_| expected())?;
        if !number.is_finite() || number < 0.0 {
            return Err(expected());
        }
        if FigureKind::of(name).is_none() {
            let kinds = FigureKind::ALL.map(FigureKind::name).join(", ");
            return Err(format!("no figure {name:?}: expected one of {kinds}, or such as kl.code"));
        }
        let (part, amount) = if percent { (number / 100.0, 0.0) } else { (0.0, number) };
        Ok(Self { name: name.to_owned(), tolerance: Tolerance { part, amount } })
    }
}

/// The tolerance of a figure: its own before that of its kind, and the last one given before others.
fn tolerance(figure: &str, kind: FigureKind, given: &[ToleranceOf]) -> Tolerance {
    let named = |name: &str| given.iter().rev().find(|one| one.name == name);
    let found = named(figure).or_else(|| named(kind.name()));
    found.map_or(kind.tolerance(), |one| one.tolerance)
}

/// Figures of a bundle.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Figures {
    /// Name of the model.
    pub model: String,
    /// What the context binaries are compiled for: `v81`, or `cpu` where there are none.
    pub target: String,
    /// Precision of the decoder's weights, where the manifest has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub precision: Option<String>,
    /// Program that made the bundle.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub made_by: Option<String>,
    /// QNN library that compiled it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compiled_by: Option<String>,
    /// The figures by their names, which begin with their kind: `size.bundle`, `kl.code`, `time.token`.
    pub figures: BTreeMap<String, f64>,
}

impl Figures {
    /// Figures of a bundle: those that its manifest has, and those of its golden steps.
    ///
    /// # Errors
    /// When the receipt belongs to other files than the bundle's.
    pub fn of(manifest: &Manifest, golden: Option<&GoldenReport>) -> Result<Self> {
        let mut figures = BTreeMap::new();
        let mut add = |name: String, value: Option<f64>| {
            if let Some(value) = value.filter(|value| value.is_finite()) {
                figures.insert(name, value);
            }
        };
        let artifacts = &manifest.artifacts;
        // Golden steps are no part of what a model costs, and their digits depend on the processor.
        let counted =
            artifacts.files.iter().filter(|(path, _)| Some(*path) != artifacts.golden.as_ref());
        let lengths: Option<Vec<u64>> = counted.map(|(_, file)| file.bytes).collect();
        let lengths = lengths.filter(|lengths| !lengths.is_empty());
        add(
            "size.bundle".into(),
            lengths.map(|all| all.iter().fold(0, |sum: u64, n| sum.saturating_add(*n)) as f64),
        );
        if let Some(receipt) = manifest.receipt()? {
            let number = |value: &Value, key: &str| value.get(key).and_then(Value::as_f64);
            add("size.weights".into(), number(receipt, "weight_bytes"));
            add("kl.mean".into(), number(receipt, "kl"));
            add(
                "headroom".into(),
                receipt.get("headroom").and_then(|found| number(found, "factor")),
            );
            for text in receipt.get("texts").and_then(Value::as_array).into_iter().flatten() {
                let Some(kind) = text.get("kind").and_then(Value::as_str) else { continue };
                for key in ["kl", "perplexity", "agreement"] {
                    add(format!("{key}.{kind}"), number(text, key));
                }
            }
        }
        for context in &artifacts.contexts {
            for (graph, us) in &context.us {
                let name = match *graph == context.key {
                    true => format!("time.{graph}"),
                    false => format!("time.{}.{graph}", context.key),
                };
                add(name, Some(*us));
            }
        }
        add("time.token".into(), token(manifest));
        for step in golden.iter().flat_map(|golden| &golden.steps) {
            add(format!("golden.{}", step.name), Some(step.cosine));
        }
        let text =
            |key: &str| manifest.model.rest.get(key).and_then(Value::as_str).map(str::to_owned);
        Ok(Self {
            model: manifest.model.name.clone(),
            target: manifest
                .model
                .dsp_arch
                .map_or_else(|| "cpu".to_owned(), |arch| format!("v{arch}")),
            precision: text("precision"),
            made_by: text("made_by"),
            compiled_by: text("compiled_by"),
            figures,
        })
    }

    /// True for figures of the same model, target and precision.
    fn is_same_bundle(&self, other: &Self) -> bool {
        (&self.model, &self.target, &self.precision)
            == (&other.model, &other.target, &other.precision)
    }

    /// The bundle in a few words.
    pub fn name(&self) -> String {
        let precision =
            self.precision.as_ref().map_or_else(String::new, |precision| format!(" {precision}"));
        format!("{}{precision} for {}", self.model, self.target)
    }
}

/// Estimate of a token: the graphs of a decoder's step and its head. None where one of them has no estimate.
fn token(manifest: &Manifest) -> Option<f64> {
    let named = |key: &str| {
        let value = manifest.plan.params.get(key).cloned().unwrap_or_default();
        let list = value.as_array().cloned().unwrap_or_else(|| vec![value]);
        list.iter().filter_map(|name| Some(name.as_str()?.to_owned())).collect::<Vec<_>>()
    };
    let decode = named("decode");
    if decode.is_empty() {
        return None;
    }
    let graphs: BTreeSet<String> = decode.into_iter().chain(named("lmhead")).collect();
    let time = |name: &String| {
        manifest.artifacts.contexts.iter().find_map(|context| {
            let own = name.strip_prefix(&context.key).and_then(|rest| rest.strip_prefix('/'));
            let found = context.us.iter().find(|(graph, _)| graph == own.unwrap_or(name));
            found.map(|(_, us)| *us)
        })
    };
    graphs.iter().map(time).sum()
}

/// Figures of bundles that later ones are compared with.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Baseline {
    schema: String,
    /// One entry for each model, target and precision.
    pub bundles: Vec<Figures>,
}

impl Default for Baseline {
    fn default() -> Self {
        Self { schema: BASELINE_SCHEMA.to_owned(), bundles: Vec::new() }
    }
}

impl Baseline {
    /// Reads a baseline.
    ///
    /// # Errors
    /// When the file cannot be read, is of another schema, or has a figure of no known kind.
    pub fn load(path: &Path) -> Result<Self> {
        let hint = "expected a file that `qhx verify --write-baseline` wrote";
        let read = files::read_json::<Self>(ErrorKind::Artifact, path, MAX_BYTES);
        let baseline = read.map_err(|e| e.hint(hint))?;
        if baseline.schema != BASELINE_SCHEMA {
            let found = &baseline.schema;
            return Err(error!(
                Artifact,
                "{}: schema {found:?}, expected {BASELINE_SCHEMA:?}",
                path.display()
            )
            .hint(hint));
        }
        let mut names = baseline.bundles.iter().flat_map(|bundle| bundle.figures.keys());
        if let Some(name) = names.find(|name| FigureKind::of(name).is_none()) {
            let kinds = FigureKind::ALL.map(FigureKind::name).join(", ");
            return Err(error!(
                Artifact,
                "{}: no figure {name:?}, expected {kinds}",
                path.display()
            )
            .hint(hint));
        }
        Ok(baseline)
    }

    /// Writes figures into a baseline, in the place of those of the same bundle; those of others stay. The file is
    /// made where it is missing.
    ///
    /// # Errors
    /// When the file is there and no baseline, or cannot be written.
    pub fn write(path: &Path, figures: &Figures) -> Result<()> {
        let mut baseline = if path.exists() { Self::load(path)? } else { Self::default() };
        baseline.bundles.retain(|bundle| !bundle.is_same_bundle(figures));
        baseline.bundles.push(figures.clone());
        // The order in which targets were forged changes no line.
        baseline.bundles.sort_by_key(Figures::name);
        let fail = |e: std::io::Error| Error::io(ErrorKind::Io, path, e);
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        let folder = folder.unwrap_or(Path::new("."));
        let mut new = tempfile::NamedTempFile::new_in(folder).map_err(fail)?;
        serde_json::to_writer_pretty(&mut new, &baseline).map_err(|e| fail(e.into()))?;
        new.write_all(b"\n").map_err(fail)?;
        new.persist(path).map(drop).map_err(|e| fail(e.error))
    }

    /// Compares a bundle's figures with those of the same model, target and precision.
    pub fn compare(&self, found: &Figures, given: &[ToleranceOf]) -> Comparison {
        let Some(baseline) = self.bundles.iter().find(|bundle| bundle.is_same_bundle(found)) else {
            let others: Vec<_> = self.bundles.iter().map(Figures::name).collect();
            let others = if others.is_empty() { "none".to_owned() } else { others.join(", ") };
            let sentence =
                format!("the baseline has no figures of {}, but of {others}", found.name());
            return Comparison { passed: false, regressions: vec![sentence], figures: Vec::new() };
        };
        let names: BTreeSet<_> = baseline.figures.keys().chain(found.figures.keys()).collect();
        let compared = names.into_iter().filter_map(|name| {
            let kind = FigureKind::of(name)?;
            let before = baseline.figures.get(name).copied();
            let now = found.figures.get(name).copied();
            Some((kind, compared(name, kind, [before, now], tolerance(name, kind, given))))
        });
        let (figures, sentences): (Vec<_>, Vec<_>) =
            compared.map(|(kind, figure)| (figure.clone(), figure.regression(kind, given))).unzip();
        let regressions: Vec<_> = sentences.into_iter().flatten().collect();
        Comparison { passed: regressions.is_empty(), regressions, figures }
    }
}

/// Change of a figure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Change {
    /// No change beyond the tolerance.
    Same,
    /// A change for the better, beyond the tolerance.
    Better,
    /// A change for the worse, beyond the tolerance.
    Worse,
    /// The bundle lacks it.
    Missing,
    /// The baseline lacks it.
    New,
}

/// A figure beside that of the baseline.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ComparedFigure {
    /// Its name.
    pub name: String,
    /// Value of the baseline.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub baseline: Option<f64>,
    /// Value of the bundle.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub found: Option<f64>,
    /// Change from one to the other.
    pub change: Change,
}

fn compared(
    name: &str,
    kind: FigureKind,
    [before, now]: [Option<f64>; 2],
    may: Tolerance,
) -> ComparedFigure {
    let change = match (before, now) {
        (Some(before), Some(now)) => {
            let worse = if kind.larger_is_better() { before - now } else { now - before };
            // Digits of a decimal fraction are no change.
            let may = may.of(before) + 1e-12 * before.abs();
            if worse > may {
                Change::Worse
            } else if worse < -may {
                Change::Better
            } else {
                Change::Same
            }
        }
        (Some(_), None) => Change::Missing,
        (None, _) => Change::New,
    };
    ComparedFigure { name: name.to_owned(), baseline: before, found: now, change }
}

impl ComparedFigure {
    /// Sentence about a change that fails.
    fn regression(&self, kind: FigureKind, given: &[ToleranceOf]) -> Option<String> {
        let Self { name, baseline, found, change } = self;
        let before = (*baseline)?;
        let was = kind.shown(before);
        match (change, found) {
            (Change::Worse, Some(now)) => {
                let allowed = tolerance(name, kind, given).shown(kind, before);
                let change = self.difference().unwrap_or_default();
                let now = kind.shown(*now);
                Some(format!(
                    "{name} is {now}, the baseline has {was}: {change}, and {allowed} are allowed"
                ))
            }
            (Change::Missing, _) => {
                Some(format!("{name} is missing, the baseline has {was}: {}", kind.missing()))
            }
            _ => None,
        }
    }

    /// Change in percent, or in the figure's own unit for shares and cosines.
    fn difference(&self) -> Option<String> {
        let (before, now) = (self.baseline?, self.found?);
        Some(match FigureKind::of(&self.name)? {
            FigureKind::Agreement => format!("{:+.1} points", (now - before) * 100.0),
            FigureKind::Golden => format!("{:+.6}", now - before),
            _ if before == 0.0 => format!("{:+.3}", now - before),
            _ => format!("{:+.1} %", (now / before - 1.0) * 100.0),
        })
    }
}

/// Comparison of a bundle with a baseline.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Comparison {
    /// No figure is worse than its tolerance allows, and none is missing.
    pub passed: bool,
    /// A sentence for each figure that fails.
    pub regressions: Vec<String>,
    /// All figures of both.
    pub figures: Vec<ComparedFigure>,
}

/// Summary of a bundle in Markdown, as pages of CI show it: a heading, what fails, and a table of figures, with a
/// column of the baseline where there is one. `faults` are failures beside the comparison.
pub fn markdown(figures: &Figures, comparison: Option<&Comparison>, faults: &[String]) -> String {
    let failed = !faults.is_empty() || comparison.is_some_and(|comparison| !comparison.passed);
    let mut text = String::new();
    // Names come from files; a cell ends at a bar, and a line at its end.
    let plain = |text: &str| text.escape_debug().to_string().replace('|', "\\|");
    let verdict = if failed { "failed" } else { "passed" };
    let _ = writeln!(text, "### {}: {verdict}\n", plain(&figures.name()));
    let regressions = comparison.iter().flat_map(|comparison| &comparison.regressions);
    let sentences: Vec<_> = faults.iter().chain(regressions).collect();
    for sentence in &sentences {
        let _ = writeln!(text, "- **{}**", plain(sentence));
    }
    if !sentences.is_empty() {
        text.push('\n');
    }
    let rows: Vec<ComparedFigure> = match comparison {
        Some(comparison) if !comparison.figures.is_empty() => comparison.figures.clone(),
        _ => {
            let new = |(name, value): (&String, &f64)| ComparedFigure {
                name: name.clone(),
                baseline: None,
                found: Some(*value),
                change: Change::New,
            };
            figures.figures.iter().map(new).collect()
        }
    };
    text.push_str("| figure | baseline | now | change | |\n|---|---:|---:|---:|---|\n");
    for row in rows {
        let kind = FigureKind::of(&row.name);
        let shown = |value: Option<f64>| {
            kind.zip(value).map_or_else(String::new, |(kind, value)| kind.shown(value))
        };
        let verdict = match row.change {
            Change::Same => "",
            Change::Better => "better",
            Change::Worse => "**worse**",
            Change::Missing => "**missing**",
            Change::New => "new",
        };
        let change = row.difference().unwrap_or_default();
        let (before, now) = (shown(row.baseline), shown(row.found));
        let _ =
            writeln!(text, "| `{}` | {before} | {now} | {change} | {verdict} |", plain(&row.name));
    }
    let made = [&figures.made_by, &figures.compiled_by];
    let made: Vec<_> = made.into_iter().flatten().map(|text| plain(text)).collect();
    if !made.is_empty() {
        let _ =
            writeln!(text, "\nMade by {}. Times are the compiler's estimates.", made.join(", "));
    }
    text.push('\n');
    text
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn figures(values: &[(&str, f64)]) -> Figures {
        Figures {
            model: "tiny".into(),
            target: "v81".into(),
            precision: Some("w4a16".into()),
            made_by: Some("qhx-forge 0.1.0".into()),
            compiled_by: None,
            figures: values.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect(),
        }
    }

    fn against(before: &[(&str, f64)], now: &[(&str, f64)], given: &[&str]) -> Comparison {
        let baseline = Baseline { bundles: vec![figures(before)], ..Baseline::default() };
        let given: Vec<ToleranceOf> = given.iter().map(|text| text.parse().unwrap()).collect();
        baseline.compare(&figures(now), &given)
    }

    #[test]
    fn a_figure_may_get_as_much_worse_as_its_tolerance() {
        for (name, before, within, beyond) in [
            ("size.bundle", 1000.0, 1010.0, 1011.0),
            ("kl.mean", 0.1, 0.11, 0.1101),
            ("perplexity.code", 10.0, 10.2, 10.21),
            ("agreement.code", 0.9, 0.88, 0.879),
            ("headroom", 10.0, 8.0, 7.9),
            ("time.token", 100.0, 105.0, 105.1),
            ("golden.generate-3", 1.0, 0.999, 0.9989),
        ] {
            for (now, passes) in [(before, true), (within, true), (beyond, false)] {
                let found = against(&[(name, before)], &[(name, now)], &[]);
                assert_eq!(found.passed, passes, "{name}: {now}: {found:?}");
            }
        }
        // A KL of next to nothing may double.
        assert!(against(&[("kl.mean", 1e-5)], &[("kl.mean", 2e-5)], &[]).passed);
    }

    #[test]
    fn a_given_tolerance_counts_before_the_default_one() {
        let time =
            |given: &[&str]| against(&[("time.token", 100.0)], &[("time.token", 107.0)], given);
        assert!(!time(&[]).passed);
        assert!(time(&["time=10%"]).passed);
        assert!(time(&["time=7"]).passed);
        assert!(!time(&["time=10%", "time.token=6%"]).passed);
        assert!(time(&["time.token=10%", "time=1%"]).passed);
        for wrong in ["time", "time=", "time=x", "time=-1", "time=nan", "speed=1%"] {
            assert!(wrong.parse::<ToleranceOf>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_regression_is_a_sentence_with_all_numbers() {
        let before = [("time.token", 2000.0), ("agreement.chat", 0.95), ("kl.mean", 0.05)];
        let now = [("time.token", 2500.0), ("agreement.chat", 0.9), ("size.bundle", 7.0)];
        assert_eq!(
            against(&before, &now, &["agreement=0.03"]).regressions,
            [
                "agreement.chat is 90.0 %, the baseline has 95.0 %: -5.0 points, and 3 points are allowed",
                "kl.mean is missing, the baseline has 5.00e-2 nats: it was forged without a receipt: leave out \
                 --no-measure",
                "time.token is 2.50 ms, the baseline has 2.00 ms: +25.0 %, and 5 % are allowed",
            ]
        );
    }

    #[test]
    fn another_bundle_than_those_of_the_baseline_fails() {
        let baseline = Baseline { bundles: vec![figures(&[])], ..Baseline::default() };
        let other = Figures { target: "v79".into(), ..figures(&[]) };
        let found = baseline.compare(&other, &[]);
        let expected =
            "the baseline has no figures of tiny w4a16 for v79, but of tiny w4a16 for v81";
        assert_eq!((found.passed, &*found.regressions[0]), (false, expected));
    }

    #[test]
    fn a_written_baseline_keeps_the_figures_of_other_bundles() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("baseline.json");
        let other = Figures { target: "v79".into(), ..figures(&[("headroom", 3.0)]) };
        for written in [&figures(&[("headroom", 1.0)]), &other, &figures(&[("headroom", 2.0)])] {
            Baseline::write(&path, written).unwrap();
        }
        let read = Baseline::load(&path).unwrap();
        assert_eq!(read.bundles, [other, figures(&[("headroom", 2.0)])]);
    }

    #[test]
    fn files_that_are_no_baseline_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("baseline.json");
        let bundle = json!({"model": "m", "target": "v81", "figures": {"speed": 1.0}});
        for (document, says) in [
            (json!({"schema": "qhx_baseline/v2", "bundles": []}), "schema \"qhx_baseline/v2\""),
            (json!({"schema": BASELINE_SCHEMA, "bundles": [bundle]}), "no figure \"speed\""),
            (json!({"schema": BASELINE_SCHEMA}), "not JSON"),
            (json!([]), "not JSON"),
        ] {
            std::fs::write(&path, document.to_string()).unwrap();
            let error = Baseline::load(&path).unwrap_err();
            assert!(error.to_string().contains(says), "{document}: {error}");
            assert!(Baseline::write(&path, &figures(&[])).is_err(), "it would be overwritten");
        }
    }

    #[test]
    fn the_summary_has_what_fails_above_a_table_of_all_figures() {
        let comparison =
            against(&[("time.token", 100.0), ("headroom", 3.0)], &[("time.token", 120.0)], &[]);
        let text =
            markdown(&figures(&[("time.token", 120.0)]), Some(&comparison), &["a | b".into()]);
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines[0], "### tiny w4a16 for v81: failed");
        assert_eq!(lines[2], "- **a \\| b**");
        assert!(lines.contains(&"| `headroom` | 3.0 times |  |  | **missing** |"), "{text}");
        assert!(
            lines.contains(&"| `time.token` | 100.0 µs | 120.0 µs | +20.0 % | **worse** |"),
            "{text}"
        );
        let alone = markdown(&figures(&[("kl.mean", 0.5)]), None, &[]);
        assert!(
            alone.contains("passed") && alone.contains("| `kl.mean` |  | 5.00e-1 nats |  | new |"),
            "{alone}"
        );
    }
}
