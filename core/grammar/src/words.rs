//! Words of grammars in the Lark syntax.

use serde_json::Value;

/// A text in a grammar.
pub(crate) fn literal(text: &str) -> String {
    Value::from(text).to_string()
}

/// A text in a regular expression.
pub(crate) fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(2 * text.len());
    for c in text.chars() {
        if r"\[](){}|*+?.^$/".contains(c) {
            escaped.push('\\');
        }
        escaped.push(c);
    }
    escaped
}

/// Any text.
pub(crate) const ANY: &str = "/(.|\\n)*/";

/// Arguments that must be there and may come in any order: with more of them each order has its place in the grammar
/// no longer, and theirs is fixed.
pub(crate) const MAX_FREE: usize = 5;

/// For each set of arguments that must still come, as bits: the ones that may be next, and what is left behind each.
pub(crate) fn orders(count: usize) -> impl Iterator<Item = (usize, Vec<(usize, usize)>)> {
    let next = move |set: usize| {
        let each = (0..count).filter(move |at| set >> at & 1 == 1);
        each.map(|at| (at, set & !(1 << at))).collect()
    };
    (1..1_usize << count).map(move |set| (set, next(set)))
}
