//! A schedule as a picture: units down, time across.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use qhx_base::escape::escaped;

use super::breakdown::{Class, ClassTime};
use super::schedule::{Trace, Unit, op_name};

/// Moments across, one of them a pixel.
const MOMENTS: usize = 1200;
/// Space for the names of units, above the rows, and around.
const LEFT: usize = 70;
const TOP: usize = 48;
const EDGE: usize = 20;
/// Height of a row and of what is drawn in it.
const ROW: usize = 22;
const BAR: usize = 18;
/// Marks on the time axis.
const MARKS: usize = 8;
/// Entries of the legend in a line, and the width of one.
const ENTRIES: usize = 5;
const ENTRY: usize = 240;
/// Shades of a moment by how much of it is taken.
const SHADES: f64 = 4.0;

/// Colour of a class on light and on dark ground.
const fn colour(class: Class) -> &'static str {
    match class {
        Class::Matmul => "#0072b2",
        Class::Weights => "#e69f00",
        Class::Dequantize => "#cc79a7",
        Class::Softmax => "#009e73",
        Class::Norm => "#7fb800",
        Class::Elementwise => "#56b4e9",
        Class::Layout => "#d55e00",
        Class::Transfers => "#b0a000",
        Class::Spill => "#a0522d",
        Class::Scheduling | Class::Idle => "#808080",
    }
}

/// Draws a schedule. Neighbouring moments of a row with the same class are one rectangle: no more than [`MOMENTS`] a
/// row, however long the schedule.
pub(super) fn svg(trace: &Trace<'_>, title: &str, classes: &[ClassTime]) -> String {
    let end = trace.end().max(1.0);
    let mut rows: BTreeMap<Unit, Vec<BTreeMap<Class, f64>>> = BTreeMap::new();
    for (unit, event) in trace.work().filter(|(unit, _)| *unit != Unit::Scalar) {
        let row = rows.entry(unit).or_insert_with(|| vec![BTreeMap::new(); MOMENTS]);
        let class = Class::of(unit, op_name(&event.name));
        let (from, to) = (event.ts, event.ts + event.dur);
        let moment = |cycles: f64| ((cycles / end * MOMENTS as f64) as usize).min(MOMENTS - 1);
        let (first, last) = (moment(from), moment(to));
        for (index, times) in row.iter_mut().enumerate().take(last + 1).skip(first) {
            let width = end / MOMENTS as f64;
            let start = index as f64 * width;
            let taken = to.min(start + width) - from.max(start);
            *times.entry(class).or_default() += taken.max(0.0) / width;
        }
    }
    let shown: Vec<_> = classes.iter().filter(|time| time.class != Class::Scheduling).collect();
    let bottom = TOP + ROW * rows.len();
    let legend = bottom + 46;
    let (width, height) = (LEFT + MOMENTS + EDGE, legend + ROW * shown.len().div_ceil(ENTRIES) + 8);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <style>.ground{{fill:#ffffff}}text{{fill:#202020}}.line{{stroke:#80808060}}\
         @media(prefers-color-scheme:dark){{.ground{{fill:#161616}}text{{fill:#e0e0e0}}}}</style>\n\
         <title>{0}</title>\n<rect class=\"ground\" width=\"{width}\" height=\"{height}\"/>\n\
         <text x=\"{LEFT}\" y=\"24\" font-size=\"14\" font-weight=\"bold\">{0}</text>\n",
        xml(title)
    );
    for (index, (unit, moments)) in rows.iter().enumerate() {
        let y = TOP + ROW * index;
        let name = match unit {
            Unit::Hvx(number) => format!("HVX {number}"),
            unit => unit.name().to_owned(),
        };
        let _ = writeln!(out, "<text x=\"8\" y=\"{}\">{name}</text>", y + 14);
        bars(&mut out, moments, y + 2);
    }
    axis(&mut out, bottom, end / trace.mhz());
    for (index, time) in shown.iter().enumerate() {
        let (x, y) = (LEFT + ENTRY * (index % ENTRIES), legend + ROW * (index / ENTRIES));
        let _ = writeln!(
            out,
            "<rect x=\"{x}\" y=\"{y}\" width=\"12\" height=\"12\" fill=\"{}\"{}/><text x=\"{}\" y=\"{}\">{}, {:.1} %</text>",
            colour(time.class),
            if time.class == Class::Idle { " fill-opacity=\"0\" stroke=\"#808080\"" } else { "" },
            x + 18,
            y + 11,
            time.class,
            time.wall_us / (end / trace.mhz()) * 100.0
        );
    }
    out.push_str("</svg>\n");
    out
}

/// Bars of a row: at each moment the class that takes the most of it, the fainter the less all take.
fn bars(out: &mut String, moments: &[BTreeMap<Class, f64>], y: usize) {
    let shade = |times: &BTreeMap<Class, f64>| {
        let most = times.iter().max_by(|a, b| a.1.total_cmp(b.1))?;
        let taken: f64 = times.values().sum();
        // What is there at all is seen.
        let shade = (taken.min(1.0) * SHADES).ceil().max(1.0);
        (*most.1 > 0.0).then_some((*most.0, shade))
    };
    let mut x = 0;
    for same in moments.chunk_by(|a, b| shade(a) == shade(b)) {
        if let Some((class, shade)) = same.first().and_then(shade) {
            let opacity = match shade < SHADES {
                true => format!(" fill-opacity=\"{}\"", shade / SHADES),
                false => String::new(),
            };
            let _ = writeln!(
                out,
                "<rect x=\"{}\" y=\"{y}\" width=\"{}\" height=\"{BAR}\" fill=\"{}\"{opacity}/>",
                LEFT + x,
                same.len(),
                colour(class)
            );
        }
        x += same.len();
    }
}

/// The time axis, in microseconds.
fn axis(out: &mut String, y: usize, us: f64) {
    let rough = us / MARKS as f64;
    let power = 10f64.powf(rough.log10().floor());
    let steps = [1.0, 2.0, 5.0, 10.0].map(|step| step * power);
    let step = steps.into_iter().find(|step| *step >= rough).unwrap_or(us);
    let marks = (0..=2 * MARKS).map(|mark| mark as f64 * step).take_while(|at| *at <= us);
    for at in marks {
        let x = LEFT as f64 + at / us * MOMENTS as f64;
        let places = usize::from(step < 1.0) * 2;
        let _ = writeln!(
            out,
            "<path class=\"line\" d=\"M{x:.1} {TOP}V{}\"/><text x=\"{x:.1}\" y=\"{}\" \
             text-anchor=\"middle\">{at:.places$}</text>",
            y + 4,
            y + 18
        );
    }
    let _ = writeln!(
        out,
        "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">time, µs</text>",
        LEFT + MOMENTS / 2,
        y + 34
    );
}

/// A text as XML, on one line.
fn xml(text: &str) -> String {
    escaped(text).replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}
