//! Rates over context length, drawn.

use std::collections::BTreeSet;
use std::fmt::Write as _;

use qhx_base::escape::escaped;

use super::rows::{BenchTable, Rate, TableRow};

/// A panel and the plot in it, in pixels.
const PANEL: (f64, f64) = (460.0, 300.0);
const PLOT: (f64, f64) = (380.0, 220.0);
/// Offset of the plot in its panel.
const LEFT: f64 = 60.0;
const TOP: f64 = 40.0;
/// A line of the legend.
const LINE: f64 = 18.0;
/// Horizontal lines of a panel, and the most lengths that are written below it.
const STEPS: u32 = 4;
const LABELS: usize = 8;
/// Characters of a series' name that are shown.
const NAME: usize = 110;
/// The colours of series (Okabe and Ito), which colour-blind people tell apart.
const COLOURS: [&str; 7] =
    ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000"];

/// Rate of a row that a panel shows.
type Shown = fn(&TableRow) -> Option<&Rate>;

impl BenchTable {
    /// Rates over context length as a drawing (SVG), one series for each table, dashed where others published it.
    pub fn svg(tables: &[Self]) -> String {
        svg(tables)
    }
}

/// One panel for prompts and one for tokens, with a series for each table; dashed are those that somebody published.
fn svg(tables: &[BenchTable]) -> String {
    let panels: [(&str, Shown); 2] = [
        ("prompt, tokens/s", |row| row.prefill.as_ref()),
        ("decode, tokens/s", |row| row.decode.as_ref()),
    ];
    let (width, legend) = (2.0 * PANEL.0, PANEL.1 + LINE);
    let height = legend + LINE * tables.len() as f64;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"{width}\" height=\"{height}\" fill=\"#ffffff\"/>\n"
    );
    for (index, (title, shown)) in panels.into_iter().enumerate() {
        let x = PANEL.0 * index as f64;
        let _ = writeln!(out, "<g transform=\"translate({x} 0)\">");
        panel(&mut out, title, tables, shown);
        out.push_str("</g>\n");
    }
    for (index, table) in tables.iter().enumerate() {
        let (line, y) = (stroke(index, table), legend + LINE * index as f64);
        let _ = writeln!(
            out,
            "<path d=\"M{LEFT} {y}h30\" {line}/><text x=\"{}\" y=\"{}\">{}</text>",
            LEFT + 40.0,
            y + 4.0,
            xml(&table.label())
        );
    }
    out.push_str("</svg>\n");
    out
}

fn panel(out: &mut String, title: &str, tables: &[BenchTable], shown: Shown) {
    let (right, bottom) = (LEFT + PLOT.0, TOP + PLOT.1);
    let _ = writeln!(
        out,
        "<text x=\"{LEFT}\" y=\"{}\" font-weight=\"bold\">{title}</text>",
        TOP - 16.0
    );
    // Both panels have the same lengths.
    let lengths: BTreeSet<usize> =
        tables.iter().flat_map(|table| &table.rows).map(|row| row.context).collect();
    let (Some(first), Some(last)) = (lengths.first(), lengths.last()) else { return };
    let (first, range) = ((*first as f64).log2(), (*last as f64 / *first as f64).log2());
    // One length only stands in the middle.
    let share = |context: usize| {
        if range > 0.0 { ((context as f64).log2() - first) / range } else { 0.5 }
    };
    let x = |context: usize| LEFT + PLOT.0 * share(context);
    let rates = tables.iter().flat_map(|table| &table.rows).filter_map(shown);
    let most = rates.map(|rate| rate.tokens_per_second).fold(0.0, f64::max);
    if most <= 0.0 {
        return;
    }
    let power = 10f64.powf(most.log10().floor());
    let top = (most / power).ceil() * power;
    let y = |rate: f64| bottom - rate / top * PLOT.1;
    for step in 0..=STEPS {
        let rate = top * f64::from(step) / f64::from(STEPS);
        let places = if top < 10.0 { 2 } else { usize::from(top < 100.0) };
        let _ = writeln!(
            out,
            "<path d=\"M{LEFT} {0:.1}H{right}\" stroke=\"#dddddd\"/>\
             <text x=\"{1}\" y=\"{2:.1}\" text-anchor=\"end\">{rate:.places$}</text>",
            y(rate),
            LEFT - 6.0,
            y(rate) + 4.0
        );
    }
    for context in lengths.iter().step_by(lengths.len().div_ceil(LABELS)) {
        let _ = writeln!(
            out,
            "<text x=\"{:.1}\" y=\"{}\" text-anchor=\"middle\">{context}</text>",
            x(*context),
            bottom + 18.0
        );
    }
    for (index, table) in tables.iter().enumerate() {
        let mut points: Vec<_> = table
            .rows
            .iter()
            .filter_map(|row| Some((row.context, shown(row)?.tokens_per_second)))
            .collect();
        points.sort_by_key(|(context, _)| *context);
        let path: Vec<_> =
            points.iter().map(|(at, rate)| format!("{:.1},{:.1}", x(*at), y(*rate))).collect();
        let line = stroke(index, table);
        let _ = writeln!(out, "<polyline points=\"{}\" {line}/>", path.join(" "));
        for (context, rate) in points {
            let (x, y, colour) = (x(context), y(rate), COLOURS[index % COLOURS.len()]);
            let _ =
                writeln!(out, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{colour}\"/>");
        }
    }
}

/// Line style of a series.
fn stroke(index: usize, table: &BenchTable) -> String {
    let colour = COLOURS[index % COLOURS.len()];
    let dashes = if table.source.is_some() { " stroke-dasharray=\"5 4\"" } else { "" };
    format!("fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"{dashes}")
}

/// A text as XML, on one line.
fn xml(text: &str) -> String {
    let mut out = String::new();
    for c in escaped(text).chars().take(NAME) {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            // No characters of XML.
            '\u{fffe}' | '\u{ffff}' => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}
