//! The tables of `docs/models.md`: which checkpoints fit which devices, and how fast they are by estimate, made again
//! from plans and from the figures of the other pages.

use std::sync::LazyLock;

use qhx_forge::Precision;

use super::published::{PLANNED, Planned, Sizes, compare, gigabytes};

/// Memory of devices in GB.
const MEMORY: [u64; 4] = [8, 12, 16, 24];
/// Part of a device's memory that an open bundle may take, by the rule of the page.
const PART: f64 = 0.5;
/// Contexts that a device holds at once.
const CONTEXTS: usize = 8;
/// Chips as `docs/estimates.md` names them, and their architectures.
const CHIPS: [(&str, &str); 4] =
    [("X Elite", "v73"), ("8 Gen 3", "v75"), ("8 Elite", "v79"), ("8 Elite Gen 5", "v81")];
/// Devices that the page answers for: their description, chip and memory.
const DEVICES: [(&str, (&str, &str), u64); 5] = [
    ("an X Elite laptop with 16 GB", CHIPS[0], 16),
    ("a phone with 8 Gen 3 and 8 GB", CHIPS[1], 8),
    ("a phone with 8 Elite and 12 GB", CHIPS[2], 12),
    ("a phone with 8 Elite Gen 5 and 16 GB", CHIPS[3], 16),
    ("a phone with 8 Elite Gen 5 and 24 GB", CHIPS[3], 24),
];
/// Tokens a second from which on an answer is read as it comes.
const FLUENT: f64 = 10.0;
const W4: Precision = Precision::W4A16;

/// Rows of the tables of a page, each its cells.
type Rows = Vec<Vec<String>>;

static ESTIMATES: LazyLock<Rows> = LazyLock::new(|| rows("estimates.md"));
static PERFORMANCE: LazyLock<Rows> = LazyLock::new(|| rows("performance.md"));
static QUALITY: LazyLock<Rows> = LazyLock::new(|| rows("quality.md"));

fn rows(page: &str) -> Rows {
    let text = std::fs::read_to_string(qhx_paths::workspace().join("docs").join(page)).unwrap();
    let rows = text.lines().filter(|line| line.starts_with("| "));
    let cells =
        |row: &str| row.trim_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect();
    rows.map(cells).collect()
}

/// Tokens a second of a w4a16 step by an estimate.
#[derive(Clone, Copy)]
struct Estimate {
    /// None where the page has one end of the range alone.
    least: Option<f64>,
    most: f64,
}

impl Estimate {
    fn shown(self) -> String {
        match self.least {
            Some(least) => format!("{least:.0} to {:.0}", self.most),
            None => format!("up to {:.0}", self.most),
        }
    }
}

/// Estimate of a checkpoint: the row `MODEL w4a16, token` of `docs/estimates.md`, or the row `MODEL, 4096` or `MODEL`
/// of the contexts in `docs/performance.md`, whose column of v73 is another chip's.
fn estimate(checkpoint: &str, (chip, arch): (&str, &str)) -> Option<Estimate> {
    let name = checkpoint.rsplit('/').next().unwrap();
    let is_it = |model: &str| name == model || name.starts_with(&format!("{model}-"));
    let of_chip = ESTIMATES.iter().find(|row| {
        row[0].strip_suffix(" w4a16, token").is_some_and(is_it)
            && row.get(1).is_some_and(|cell| cell == chip)
    });
    let head = PERFORMANCE
        .iter()
        .position(|row| row[0].is_empty() && row[1..].starts_with(&["v81".into(), "v79".into()]));
    let (head, contexts) = PERFORMANCE.split_at(head.unwrap() + 1);
    let column = head.last().unwrap().iter().position(|cell| cell == arch && arch != "v73");
    let of_arch = |suffix: &str| {
        let row = contexts.iter().find(|row| row[0].strip_suffix(suffix).is_some_and(is_it))?;
        row.get(column?).cloned().filter(|cell| !cell.is_empty())
    };
    let cell =
        of_chip.map(|row| row[3].clone()).or_else(|| of_arch(", 4096")).or_else(|| of_arch(""))?;
    let mut rates = cell.split(" to ").map(|ms| 1e3 / ms.parse::<f64>().unwrap());
    Some(Estimate { most: rates.next().unwrap(), least: rates.next() })
}

/// GB a second that a chip's NPU reads, by the table of `docs/estimates.md` that has them from published times.
fn memory_rate(chip: &str) -> f64 {
    let is_rate =
        |row: &&Vec<String>| row.len() == 5 && row[0] == chip && row[1].parse::<f64>().is_ok();
    ESTIMATES.iter().find(is_rate).unwrap()[1].parse().unwrap()
}

/// Divergence of a precision from f16 weights, where `docs/quality.md` has it.
fn quality(checkpoint: &str, precision: Precision) -> Option<String> {
    let short = checkpoint.rsplit('/').next().unwrap().to_lowercase();
    let mut model = String::new();
    QUALITY.iter().find_map(|row| {
        if !row[0].is_empty() {
            model = row[0].to_lowercase().replace(' ', "-");
        }
        let is_it =
            short.starts_with(&model) && row.get(1)? == &format!("qhx {}", precision.name());
        is_it.then(|| row[2].clone())
    })
}

/// The smallest of [`MEMORY`] for an open bundle, by the rule of the page.
fn memory(sizes: &Sizes) -> Option<u64> {
    MEMORY.into_iter().find(|gb| sizes.open_bytes as f64 <= *gb as f64 * 1e9 * PART)
}

/// Reason why a bundle fits no device of the page, or the memory from which on it does.
fn fits(sizes: &Sizes) -> String {
    match memory(sizes) {
        _ if sizes.contexts > CONTEXTS => format!("no: {} contexts", sizes.contexts),
        Some(gb) => format!("from {gb}"),
        None => "no: over 24".to_owned(),
    }
}

fn fit_row(checkpoint: &Planned) -> String {
    let cells =
        Precision::ALL.into_iter().rev().map(|precision| match checkpoint.sizes(precision) {
            Ok(sizes) => format!("{}; {}; {}", gigabytes(sizes.bytes), sizes.contexts, fits(sizes)),
            Err(what) => what.to_owned(),
        });
    let quality = [W4, Precision::W8A16].map(|precision| quality(&checkpoint.name, precision));
    let quality = match quality {
        [None, None] => String::new(),
        both => both.map(|kl| kl.unwrap_or_else(|| "–".to_owned())).join("; "),
    };
    format!("| {} | {} | {quality} |\n", checkpoint.name, cells.collect::<Vec<_>>().join(" | "))
}

/// Bound of tokens a second: the weights that a step reads, at the rate of the chip's memory.
fn bound(step_bytes: u64, chip: &str) -> f64 {
    memory_rate(chip) * 1e9 / step_bytes as f64
}

fn rate_row(checkpoint: &Planned) -> Option<String> {
    let step = checkpoint.sizes(W4).ok()?.step_bytes?;
    let rates = CHIPS.map(|chip| match estimate(&checkpoint.name, chip) {
        Some(estimate) => format!("**{}**", estimate.shown()),
        None => format!("< {:.0}", bound(step, chip.0)),
    });
    let step = format!("{:.2} GB", step as f64 / 1e9);
    Some(format!("| {} | {step} | {} |\n", checkpoint.name, rates.join(" | ")))
}

/// The largest model of text that is fluent by estimate, the largest one that fits, and the largest one with images.
fn answer((device, chip, gb): (&str, (&str, &str), u64)) -> String {
    let fitting = PLANNED.iter().filter_map(|checkpoint| {
        let sizes = checkpoint.sizes(W4).ok()?;
        let fits = sizes.contexts <= CONTEXTS && memory(sizes).is_some_and(|least| least <= gb);
        Some((&*checkpoint.name, sizes, sizes.step_bytes?)).filter(|_| fits)
    });
    let fitting: Vec<_> = fitting.collect();
    let largest = |wanted: &dyn Fn(&str, &Sizes) -> bool| {
        let found = fitting.iter().filter(|(name, sizes, _)| wanted(name, sizes));
        let (name, sizes, step) = found.max_by_key(|(_, sizes, _)| sizes.bytes)?;
        let rate = match estimate(name, chip) {
            Some(estimate) => format!("{} tokens/s by estimate", estimate.shown()),
            None => format!("less than {:.0} tokens/s", bound(*step, chip.0)),
        };
        Some(format!("{name} ({}, {rate})", gigabytes(sizes.bytes)))
    };
    let is_fluent = |name: &str| {
        estimate(name, chip).and_then(|estimate| estimate.least).is_some_and(|rate| rate >= FLUENT)
    };
    let most = largest(&|_, sizes| !sizes.sees).unwrap();
    let first = match largest(&|name, sizes| !sizes.sees && is_fluent(name)) {
        Some(fluent) => format!("{fluent}. The largest that fits is {most}"),
        None => format!("{most}, the largest that fits"),
    };
    let images = largest(&|_, sizes| sizes.sees).unwrap();
    wrapped(&format!("- **On {device}** take {first}; with images {images}."))
}

/// An item of a list in lines of 120 columns.
fn wrapped(text: &str) -> String {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let line = lines.last_mut().unwrap();
        if line.chars().count() + 1 + word.chars().count() > 120 {
            lines.push(format!("  {word}"));
        } else {
            let gap = if line.is_empty() { "" } else { " " };
            *line += &format!("{gap}{word}");
        }
    }
    lines.join("\n") + "\n"
}

#[test]
fn the_page_of_models_answers_by_plans_and_estimates() {
    let answers: String = DEVICES.into_iter().map(answer).collect();
    compare("models.md", ["<!-- answers -->\n", "<!-- end of the answers -->\n"], &answers);
}

#[test]
fn the_page_of_models_says_what_fits() {
    let head = "| checkpoint | w4a16: size; contexts; memory | w8a16 | fp16 | KL: w4a16; w8a16 |\n|---|---|---|---|---|\n";
    let rows: String = PLANNED.iter().map(fit_row).collect();
    let marks = ["<!-- table of sizes -->\n", "<!-- end of the sizes -->\n"];
    compare("models.md", marks, &format!("{head}{rows}"));
}

#[test]
fn the_page_of_models_says_how_fast() {
    let chips = CHIPS.map(|(chip, arch)| format!("{chip}, {arch}")).join(" | ");
    let head =
        format!("| checkpoint, w4a16 | a token reads | {chips} |\n|---|---|---|---|---|---|\n");
    let rows: String = PLANNED.iter().filter_map(rate_row).collect();
    let marks = ["<!-- table of rates -->\n", "<!-- end of the rates -->\n"];
    compare("models.md", marks, &format!("{head}{rows}"));
}

#[test]
fn a_planned_bundle_holds_what_its_tokens_read() {
    for checkpoint in PLANNED.iter() {
        for sizes in checkpoint.plans.iter().filter_map(|plan| plan.as_ref().ok()) {
            let step = sizes.step_bytes.unwrap_or(0);
            assert!(step < sizes.bytes, "{}: {step} of {}", checkpoint.name, sizes.bytes);
        }
    }
}

#[test]
fn figures_of_other_pages_are_found() {
    let known = CHIPS.map(|chip| estimate("meta-llama/Llama-3.2-1B-Instruct", chip).is_some());
    assert_eq!(known, [true, false, true, true]);
    assert!(estimate("Qwen/Qwen3-4B", CHIPS[2]).is_some_and(|found| found.least.is_some()));
    assert!(quality("google/gemma-3-270m-it", W4).is_some());
    assert!(quality("google/gemma-3-1b-it", W4).is_none());
    // The page says how far estimates are below bounds: a quarter to two thirds.
    for checkpoint in PLANNED.iter() {
        let Some(step) = checkpoint.sizes(W4).ok().and_then(|sizes| sizes.step_bytes) else {
            continue;
        };
        for chip in CHIPS {
            let Some(found) = estimate(&checkpoint.name, chip) else { continue };
            let bound = bound(step, chip.0);
            let (least, most) = (found.least.unwrap_or(found.most) / bound, found.most / bound);
            assert!(
                0.25 <= least && most <= 0.67,
                "{} on {chip:?}: {least}, {most}",
                checkpoint.name
            );
        }
    }
}
