//! The formats in which models write calls: a row of a table each, which the reader of answers, the grammar of calls
//! and the way of results back into a conversation follow.

use std::fmt;

use super::tags::Tags;
use super::{Tool, ToolCall, json, pairs, python, tags};
use crate::REASONING;

/// Format in which a model writes tool calls.
///
/// A group of calls stands between two marks: `start`, the call or calls with what `inner` puts around them, `end`.
#[derive(Debug)]
#[non_exhaustive]
pub struct Syntax {
    /// Name in messages.
    pub name: &'static str,
    /// Texts of a chat template that asks for the format: all of one list.
    signs: &'static [&'static [&'static str]],
    /// Text that a group begins with; empty where there is none.
    pub start: &'static str,
    /// Text that a group ends with; empty where there is none.
    pub end: &'static str,
    /// Texts before the first call of a group, between two of its calls, and behind the last one. A group has one call
    /// where the middle one is empty.
    pub inner: [&'static str; 3],
    /// Text between two groups; `None` where an answer has one.
    pub next: Option<&'static str>,
    /// Syntax of a single call.
    pub call: CallSyntax,
    /// Special token with which the model hands over to whoever runs the calls.
    pub(crate) handover: Option<&'static str>,
    /// Results stand within the message that has the calls, where the template takes no messages of tools.
    pub(crate) results_within: bool,
}

/// Syntax of a single call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum CallSyntax {
    /// `{"name": NAME, KEY: {…}}`.
    Json {
        /// Key of the arguments.
        arguments: &'static str,
    },
    /// The name, a text, and the arguments as JSON.
    Named {
        /// Text between name and arguments.
        between: &'static str,
    },
    /// The name and each argument between tags.
    Tags(Tags),
    /// `NAME(KEY=VALUE, …)`, with values as Python writes them.
    Python,
    /// `call:NAME{KEY:VALUE,…}`, with bare keys.
    Pairs {
        /// Text on both sides of a text.
        quote: &'static str,
    },
}

/// Defaults of a row.
const COMMON: Syntax = Syntax {
    name: "",
    signs: &[],
    start: "",
    end: "",
    inner: ["", "", ""],
    next: None,
    call: CallSyntax::Json { arguments: "arguments" },
    handover: None,
    results_within: false,
};
/// A list of JSON.
const LIST: [&str; 3] = ["[", ", ", "]"];

static PAIRS: Syntax = Syntax {
    name: "pairs",
    signs: &[&["<|tool_call>"]],
    start: "<|tool_call>",
    end: "<tool_call|>",
    next: Some(""),
    call: CallSyntax::Pairs { quote: "<|\"|>" },
    handover: Some("<|tool_response>"),
    results_within: true,
    ..COMMON
};
static ESCAPED_PAIRS: Syntax = Syntax {
    name: "escaped pairs",
    signs: &[&["<start_function_call>"]],
    start: "<start_function_call>",
    end: "<end_function_call>",
    next: Some(""),
    call: CallSyntax::Pairs { quote: "<escape>" },
    handover: Some("<start_function_response>"),
    ..COMMON
};
static ELEMENTS: Syntax = Syntax {
    name: "elements",
    signs: &[&["<tool_call>", "<parameter="]],
    start: "<tool_call>",
    end: "</tool_call>",
    inner: ["\n", "", ""],
    next: Some("\n"),
    call: CallSyntax::Tags(Tags {
        call: ["<function=", ">\n", "</function>\n"],
        key: ["<parameter=", ">"],
        value: ["\n", "\n</parameter>\n"],
    }),
    ..COMMON
};
static KEYS_AND_VALUES: Syntax = Syntax {
    name: "keys and values",
    signs: &[&["<arg_key>"]],
    start: "<tool_call>",
    end: "</tool_call>",
    next: Some("\n"),
    call: CallSyntax::Tags(Tags {
        call: ["", "\n", ""],
        key: ["<arg_key>", "</arg_key>\n"],
        value: ["<arg_value>", "</arg_value>\n"],
    }),
    ..COMMON
};
static PYTHON: Syntax = Syntax {
    name: "Python",
    signs: &[&["<|tool_call_start|>"], &["<|tool_list_start|>"], &["List of tools: ["]],
    start: "<|tool_call_start|>",
    end: "<|tool_call_end|>",
    inner: LIST,
    call: CallSyntax::Python,
    ..COMMON
};
static NAMED: Syntax = Syntax {
    name: "named",
    signs: &[&["[ARGS]"]],
    start: "[TOOL_CALLS]",
    next: Some(""),
    call: CallSyntax::Named { between: "[ARGS]" },
    ..COMMON
};
static LISTED: Syntax = Syntax {
    name: "listed",
    signs: &[&["[TOOL_CALLS]"]],
    start: "[TOOL_CALLS]",
    inner: LIST,
    ..COMMON
};
static ENCLOSED_LIST: Syntax = Syntax {
    name: "enclosed list",
    signs: &[&["<|/tool_call|>"]],
    start: "<|tool_call|>",
    end: "<|/tool_call|>",
    inner: LIST,
    ..COMMON
};
static MARKED_LIST: Syntax = Syntax {
    name: "marked list",
    signs: &[&["<|tool_call|>"]],
    start: "<|tool_call|>",
    inner: LIST,
    ..COMMON
};
static CAPITALS: Syntax = Syntax {
    name: "capitals",
    signs: &[&["<TOOLCALL>"]],
    start: "<TOOLCALL>",
    end: "</TOOLCALL>",
    inner: LIST,
    ..COMMON
};
static TAGGED: Syntax = Syntax {
    name: "tagged",
    signs: &[&["<tool_call>"]],
    start: "<tool_call>",
    end: "</tool_call>",
    inner: ["\n", "", "\n"],
    next: Some("\n"),
    ..COMMON
};
static BARE: Syntax = Syntax {
    name: "bare",
    signs: &[&[PYTHON_TAG], &["\"parameters\":"], &["\\\"parameters\\\":"]],
    inner: ["", "; ", ""],
    call: CallSyntax::Json { arguments: "parameters" },
    ..COMMON
};

/// May stand before bare calls.
const PYTHON_TAG: &str = "<|python_tag|>";

/// Format in which a model writes tool calls: see [`Syntax`].
#[derive(Clone, Copy)]
pub struct CallFormat(&'static Syntax);

impl CallFormat {
    /// `<|tool_call>call:NAME{KEY:<|"|>TEXT<|"|>,KEY:3}<tool_call|>`.
    pub const PAIRS: Self = Self(&PAIRS);
    /// The same between `<start_function_call>` and `<end_function_call>`, with `<escape>` around texts.
    pub const ESCAPED_PAIRS: Self = Self(&ESCAPED_PAIRS);
    /// `<tool_call>`, `<function=NAME>`, and for each argument `<parameter=NAME>`, its value and `</parameter>`, a line
    /// each.
    pub const ELEMENTS: Self = Self(&ELEMENTS);
    /// `<tool_call>NAME`, and for each argument `<arg_key>KEY</arg_key>` and `<arg_value>VALUE</arg_value>`.
    pub const KEYS_AND_VALUES: Self = Self(&KEYS_AND_VALUES);
    /// A list of calls as Python writes them between `<|tool_call_start|>` and `<|tool_call_end|>`.
    pub const PYTHON: Self = Self(&PYTHON);
    /// `[TOOL_CALLS]NAME[ARGS]{…}`.
    pub const NAMED: Self = Self(&NAMED);
    /// `[TOOL_CALLS]` and a JSON list of `{"name": …, "arguments": …}`.
    pub const LISTED: Self = Self(&LISTED);
    /// The same list between `<|tool_call|>` and `<|/tool_call|>`.
    pub const ENCLOSED_LIST: Self = Self(&ENCLOSED_LIST);
    /// The same list behind `<|tool_call|>`.
    pub const MARKED_LIST: Self = Self(&MARKED_LIST);
    /// The same list between `<TOOLCALL>` and `</TOOLCALL>`.
    pub const CAPITALS: Self = Self(&CAPITALS);
    /// `<tool_call>`, `{"name": …, "arguments": …}`, `</tool_call>` on three lines.
    pub const TAGGED: Self = Self(&TAGGED);
    /// `{"name": …, "parameters": …}`, maybe behind `<|python_tag|>`.
    pub const BARE: Self = Self(&BARE);

    /// All of them. The first one that a template has a sign of is its own.
    pub const ALL: [Self; 12] = [
        Self::PAIRS,
        Self::ESCAPED_PAIRS,
        Self::ELEMENTS,
        Self::KEYS_AND_VALUES,
        Self::PYTHON,
        Self::NAMED,
        Self::LISTED,
        Self::ENCLOSED_LIST,
        Self::MARKED_LIST,
        Self::CAPITALS,
        Self::TAGGED,
        Self::BARE,
    ];

    /// The format that a chat template asks for; `None` where it knows no tools, or no format that is known here.
    pub fn of_template(source: &str) -> Option<Self> {
        let all = |signs: &&[&str]| signs.iter().all(|sign| source.contains(sign));
        let asks = |format: &Self| format.0.signs.iter().any(all);
        Self::ALL.into_iter().find(asks).filter(|_| source.contains("tool"))
    }

    /// Its row of the table.
    pub fn syntax(self) -> &'static Syntax {
        self.0
    }

    /// Texts that a group of calls begins and ends with; empty where there is none.
    pub fn marks(self) -> (&'static str, &'static str) {
        (self.0.start, self.0.end)
    }

    /// Special token with which the model hands over to whoever runs its calls: an answer ends there.
    pub fn handover(self) -> Option<&'static str> {
        self.0.handover
    }

    /// The calls in an answer, whose special tokens are spelled out, in order. What looks like a call and cannot be
    /// read is none. `tools` say which arguments are texts, where the format does not.
    pub fn calls(self, answer: &str, tools: &[Tool]) -> Vec<ToolCall> {
        let text = REASONING.iter().fold(answer, |text, marks| marks.behind(text, self.0.start));
        let mut calls = self.marked_calls(text, tools);
        if calls.is_empty() {
            calls.extend(match self.0.call {
                CallSyntax::Pairs { quote } => pairs::unmarked(text, quote, tools),
                CallSyntax::Tags(syntax)
                    if !self.unmarked().is_empty() && text.contains(self.unmarked()) =>
                {
                    tags::unmarked(text, &syntax, self.0.end, tools)
                }
                _ => json::bare_call(text, tools),
            });
        }
        calls
    }

    fn marked_calls(self, answer: &str, tools: &[Tool]) -> Vec<ToolCall> {
        let mut calls = Vec::new();
        let Syntax { start, end, call, .. } = *self.0;
        if start.is_empty() {
            let text = answer.trim_start();
            json::calls(text.strip_prefix(PYTHON_TAG).unwrap_or(text), &mut calls);
            return calls;
        }
        let mut rest = answer;
        while let Some((_, behind)) = rest.split_once(start) {
            rest = behind;
            match call {
                CallSyntax::Tags(syntax) => {
                    if let Some((call, behind)) = tags::call(rest, &syntax, end, tools) {
                        calls.push(call);
                        rest = behind;
                    }
                }
                CallSyntax::Pairs { quote } => {
                    if let Some((call, behind)) = pairs::call(rest, quote) {
                        calls.push(call);
                        rest = behind;
                    }
                }
                CallSyntax::Python => {
                    let text = rest.split_once(end).map_or(rest, |(text, _)| text);
                    calls.extend(python::calls(text));
                }
                CallSyntax::Json { .. } | CallSyntax::Named { .. } => {
                    rest = json::calls(rest, &mut calls);
                }
            }
        }
        calls
    }

    /// Text that a call without its mark begins with, wherever it stands; empty where it begins an answer only.
    pub fn unmarked(self) -> &'static str {
        match self.0.call {
            CallSyntax::Tags(Tags { call: [open, ..], .. }) => open,
            _ => "",
        }
    }

    /// True for a text that begins with a call of one of the tools without the marks, as models write it that forget
    /// them; `None` while it may become one.
    pub fn begins_unmarked(self, text: &str, tools: &[Tool]) -> Option<bool> {
        let text: String = text.chars().filter(|c| !c.is_whitespace()).collect();
        let mut begins = tools.iter().map(|tool| match self.0.call {
            CallSyntax::Pairs { .. } => format!("{}{}{{", pairs::CALL, tool.name),
            _ => format!("{{\"name\":\"{}\"", tool.name),
        });
        if begins.clone().any(|begin| text.starts_with(&begin)) {
            return Some(true);
        }
        (!begins.any(|begin| begin.starts_with(&text))).then_some(false)
    }
}

impl fmt::Debug for CallFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CallFormat").field(&self.0.name).finish()
    }
}

impl PartialEq for CallFormat {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self.0, other.0)
    }
}

impl Eq for CallFormat {}
