//! A template's source, before the engine parses it.
//!
//! One pass over the tokens does two things. It refuses what would take a recursive parser, compiler or destructor
//! deeper than a thread's stack. And it writes differently what the engine understands otherwise than Jinja2:
//!
//! | Jinja2 | becomes | because |
//! |---|---|---|
//! | `a % b` | `__mod__(a , b)` | the engine does not format strings with `%` |
//! | `a ~ b` | `__str__(a) ~ __str__(b)` | lists and dictionaries have Python's form |
//! | `x.items` | `x.__attr__('items')` | the engine finds a key before the method of a dictionary |
//! | `set x = y` | `set x = __set__(y)` | what is kept is bounded in size and depth |
//! | `for x in y` | `for x in __iter__(y)` | none has no items, which the engine takes for an empty list |
//! | `generation` | `if true` | the block marks answers for training only |
//!
//! Text between tags, comments and raw blocks stay as they are, and so do the numbers of the lines.

use std::fmt::Write as _;

use super::methods::OF_MAPPINGS;

/// Maximum depth of the engine's tree of one expression: calls, subscripts, filters and operators in a row count as
/// well as nested brackets.
const MAX_DEPTH: usize = 400;

/// Maximum number of `elif` in all open `if` blocks together.
const MAX_ELIF: usize = 200;

/// Bytes that the pass may write: `%` in a row grow the source.
const MAX_PREPARED: usize = 8 << 20;

/// Source for the engine, or a message about what is wrong.
pub(super) fn prepare(source: &str) -> Result<String, String> {
    // As Jinja2 does, before anything else.
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let mut out = String::with_capacity(source.len() + source.len() / 4);
    let mut rest = source.as_str();
    let mut branches: Vec<usize> = Vec::new();
    let begins = |pair: &[u8]| matches!(pair, b"{{" | b"{%" | b"{#");
    while let Some(start) = rest.as_bytes().windows(2).position(begins) {
        out.push_str(&rest[..start]);
        let line = || source[..source.len() - rest.len() + start].matches('\n').count() + 1;
        let tag = &rest[start..];
        rest = if tag.starts_with("{#") {
            let end = tag
                .find("#}")
                .ok_or_else(|| format!("a comment that begins in line {} has no end", line()))?;
            out.push_str(&tag[..end + 2]);
            &tag[end + 2..]
        } else if let Some(len) = raw_block(tag) {
            out.push_str(&tag[..len]);
            &tag[len..]
        } else {
            let scanner = Scanner::new(tag, &mut out);
            let (len, name) = scanner.run().map_err(|why| format!("{why} (in line {})", line()))?;
            match name.as_str() {
                "if" => branches.push(0),
                "elif" => {
                    if let Some(last) = branches.last_mut() {
                        *last += 1;
                    }
                    if branches.iter().sum::<usize>() > MAX_ELIF {
                        return Err(format!("more than {MAX_ELIF} elif (in line {})", line()));
                    }
                }
                "endif" => drop(branches.pop()),
                _ => {}
            }
            &tag[len..]
        };
        if out.len() > MAX_PREPARED {
            return Err("expressions are too long".to_owned());
        }
    }
    out.push_str(rest);
    Ok(out)
}

/// Length of a raw block that `text` begins with.
fn raw_block(text: &str) -> Option<usize> {
    let named = |text: &str, name: &str| {
        let inner = text.strip_prefix("{%")?;
        let inner = inner.strip_prefix(['-', '+']).unwrap_or(inner).trim_start();
        let after = inner.strip_prefix(name)?.trim_start();
        let after = after.strip_prefix(['-', '+']).unwrap_or(after).strip_prefix("%}")?;
        Some(text.len() - after.len())
    };
    let body = named(text, "raw")?;
    let mut at = body;
    while let Some(next) = text[at..].find("{%") {
        if let Some(len) = named(&text[at + next..], "endraw") {
            return Some(at + next + len);
        }
        at += next + 2;
    }
    // Without an end: the engine says so.
    Some(text.len())
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Top,
    Group,
    Call,
    Index,
    List,
    Map,
}

/// Precedence of an operator: calls opened for an operand end before the next operator that binds as loosely.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Rank {
    Product,
    Concat,
    Sum,
    Lowest,
}

/// Text between two brackets, or the whole tag.
struct Level {
    kind: Kind,
    /// Offset of the operand of a sum in the output that is being read.
    operand: usize,
    /// True if the next token begins an operand.
    begins: bool,
    /// Calls that end before an operator of this rank.
    open: Vec<Rank>,
    /// The operand on the left of `~` is wrapped already.
    joined: bool,
    /// Operators and the like since the last comma.
    depth: usize,
}

struct Scanner<'a> {
    text: &'a str,
    at: usize,
    out: &'a mut String,
    levels: Vec<Level>,
    depth: usize,
    /// An operand comes next, not an operator.
    expects_operand: bool,
    /// The name of the tag; empty in an expression.
    name: String,
    /// The names that are assigned come, up to `=` or `in`.
    target: bool,
    dotted: bool,
    /// The iterable of a loop is being read.
    iterates: bool,
}

impl<'a> Scanner<'a> {
    fn new(text: &'a str, out: &'a mut String) -> Self {
        Self {
            text,
            at: 0,
            out,
            levels: Vec::new(),
            depth: 0,
            expects_operand: true,
            name: String::new(),
            target: false,
            dotted: false,
            iterates: false,
        }
    }

    /// Reads a tag to its end. Its length, and its name if it is a block's.
    fn run(mut self) -> Result<(usize, String), String> {
        let block = self.text.starts_with("{%");
        self.copy(2);
        if self.rest().starts_with(['-', '+']) {
            self.copy(1);
        }
        let ends: &[&str] = if block { &["%}", "-%}", "+%}"] } else { &["}}", "-}}"] };
        self.space();
        if block {
            self.tag_name()?;
        }
        self.enter(Kind::Top)?;
        loop {
            self.space();
            if self.levels.len() == 1
                && let Some(end) = ends.iter().find(|end| self.rest().starts_with(**end))
            {
                self.boundary(Rank::Lowest);
                if self.iterates || self.name == "set" && !self.target {
                    self.out.push(')');
                }
                self.copy(end.len());
                return Ok((self.at, self.name));
            }
            self.token()?;
        }
    }

    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    fn copy(&mut self, len: usize) {
        self.out.push_str(&self.text[self.at..self.at + len]);
        self.at += len;
    }

    fn space(&mut self) {
        let rest = self.rest();
        self.copy(rest.len() - rest.trim_start().len());
    }

    fn tag_name(&mut self) -> Result<(), String> {
        let len = name_len(self.rest());
        self.name = self.rest()[..len].to_owned();
        let written = match self.name.as_str() {
            "generation" => "if true",
            "endgeneration" => "endif",
            // Statements of the engine that Jinja2 does not have, and those that read other files.
            name @ ("do" | "include" | "import" | "from" | "extends") => {
                return Err(format!("unknown tag '{name}'"));
            }
            other => other,
        };
        self.out.push_str(written);
        self.at += len;
        self.target = matches!(self.name.as_str(), "set" | "for");
        // The names of `call(x)` stand in brackets like those of a macro.
        self.expects_operand = self.name != "call";
        Ok(())
    }

    fn level(&mut self) -> &mut Level {
        // `run` enters the first and `close` keeps it.
        let last = self.levels.len() - 1;
        &mut self.levels[last]
    }

    fn enter(&mut self, kind: Kind) -> Result<(), String> {
        let at = self.out.len();
        self.levels.push(Level {
            kind,
            operand: at,
            begins: true,
            open: Vec::new(),
            joined: false,
            depth: 0,
        });
        self.deeper(0)
    }

    fn deeper(&mut self, by: usize) -> Result<(), String> {
        self.level().depth += by;
        self.depth += by;
        // A bracket is an expression and what is in it.
        match self.depth + 2 * self.levels.len() > MAX_DEPTH {
            true => Err(format!("an expression is nested deeper than {MAX_DEPTH}")),
            false => Ok(()),
        }
    }

    /// Closes what was opened for an operand that ends here.
    fn boundary(&mut self, rank: Rank) {
        let level = self.level();
        let mut closed = 0;
        while level.open.last().is_some_and(|open| *open <= rank) {
            level.open.pop();
            closed += 1;
        }
        self.out.extend(std::iter::repeat_n(')', closed));
    }

    /// An operator between two operands, or what separates like one.
    fn operator(&mut self, len: usize, rank: Rank) -> Result<(), String> {
        self.boundary(rank);
        let level = self.level();
        if rank > Rank::Product {
            level.begins = true;
        }
        if rank > Rank::Concat {
            level.joined = false;
        }
        self.copy(len);
        self.expects_operand = true;
        self.deeper(1)
    }

    fn token(&mut self) -> Result<(), String> {
        let rest = self.rest();
        let Some(first) = rest.chars().next() else {
            return Err("a tag has no end".to_owned());
        };
        let level_begins = std::mem::take(&mut self.level().begins);
        if level_begins {
            self.level().operand = self.out.len();
        }
        match first {
            '"' | '\'' => self.string(first),
            '0'..='9' => {
                self.copy(number_len(rest));
                self.expects_operand = false;
                Ok(())
            }
            _ if first.is_alphabetic() || first == '_' => self.word(),
            '(' | '[' | '{' => self.open(first),
            ')' | ']' | '}' => self.close(),
            ',' => self.comma(),
            ':' => self.colon(),
            '.' | '|' => {
                self.dotted |= first == '.';
                self.copy(1);
                self.space();
                let len = name_len(self.rest());
                let (name, after) = self.rest().split_at(len);
                let called = after.trim_start().starts_with('(');
                if first == '.' && !called && !self.target && OF_MAPPINGS.contains(&name) {
                    let _ = write!(self.out, "__attr__('{name}')");
                    self.at += len;
                } else {
                    self.copy(len);
                }
                self.expects_operand = false;
                self.deeper(1)
            }
            '~' => self.tilde(),
            _ if self.expects_operand => {
                // A sign, or the stars of unpacked arguments.
                self.copy(first.len_utf8());
                self.deeper(1)
            }
            '%' => {
                self.boundary(Rank::Product);
                let at = self.level().operand;
                self.out.insert_str(at, "__mod__(");
                self.out.push(',');
                self.at += 1;
                self.level().open.push(Rank::Product);
                self.expects_operand = true;
                self.deeper(2)
            }
            '*' if rest.starts_with("**") => {
                self.copy(2);
                self.expects_operand = true;
                self.deeper(1)
            }
            '*' => self.operator(1, Rank::Product),
            '/' => self.operator(if rest.starts_with("//") { 2 } else { 1 }, Rank::Product),
            '+' | '-' => self.operator(1, Rank::Sum),
            '=' | '!' | '<' | '>' if rest[1..].starts_with('=') => self.operator(2, Rank::Lowest),
            '=' if self.target && self.name == "set" && self.levels.len() == 1 => {
                self.target = false;
                self.operator(1, Rank::Lowest)?;
                self.out.push_str(if self.dotted { " __set_attr__(" } else { " __set__(" });
                Ok(())
            }
            '=' | '<' | '>' => self.operator(1, Rank::Lowest),
            other => Err(format!("unexpected character {other:?}")),
        }
    }

    fn word(&mut self) -> Result<(), String> {
        let len = name_len(self.rest());
        let word = &self.rest()[..len];
        match word {
            "not" if self.expects_operand => {
                self.copy(len);
                self.level().begins = true;
                self.deeper(1)
            }
            "in" if self.target && self.name == "for" => {
                self.target = false;
                self.iterates = true;
                self.operator(len, Rank::Lowest)?;
                self.out.push_str(" __iter__(");
                Ok(())
            }
            "if" | "recursive" if self.iterates && self.levels.len() == 1 => {
                self.iterates = false;
                self.boundary(Rank::Lowest);
                self.out.push_str(") ");
                self.operator(len, Rank::Lowest)
            }
            "and" | "or" | "if" | "else" | "in" | "not" => self.operator(len, Rank::Lowest),
            "is" => {
                self.operator(len, Rank::Lowest)?;
                self.space();
                if let Some(after) = self.rest().strip_prefix("not")
                    && name_len(after) == 0
                {
                    self.copy(3);
                    self.space();
                }
                // The test's name, which may be a keyword.
                self.copy(name_len(self.rest()));
                self.expects_operand = false;
                Ok(())
            }
            _ => {
                self.copy(len);
                self.expects_operand = false;
                Ok(())
            }
        }
    }

    fn tilde(&mut self) -> Result<(), String> {
        self.boundary(Rank::Concat);
        if !std::mem::replace(&mut self.level().joined, true) {
            let at = self.level().operand;
            self.out.insert_str(at, "__str__(");
            self.out.push(')');
        }
        self.copy(1);
        self.out.push_str(" __str__(");
        let level = self.level();
        level.open.push(Rank::Concat);
        level.begins = true;
        self.expects_operand = true;
        self.deeper(2)
    }

    fn open(&mut self, bracket: char) -> Result<(), String> {
        let kind = match bracket {
            '(' if self.expects_operand => Kind::Group,
            '(' => Kind::Call,
            '[' if self.expects_operand => Kind::List,
            '[' => Kind::Index,
            _ => Kind::Map,
        };
        self.enter(kind)?;
        self.copy(1);
        self.expects_operand = true;
        Ok(())
    }

    fn close(&mut self) -> Result<(), String> {
        if self.levels.len() == 1 {
            return Err(format!("unexpected {:?}", &self.rest()[..1]));
        }
        self.boundary(Rank::Lowest);
        let Level { kind, depth, .. } = *self.level();
        let expected = match kind {
            Kind::Group | Kind::Call => ')',
            Kind::Index | Kind::List => ']',
            Kind::Map | Kind::Top => '}',
        };
        if !self.rest().starts_with(expected) {
            return Err(format!("unexpected {:?}, expected {expected:?}", &self.rest()[..1]));
        }
        self.copy(1);
        self.levels.pop();
        self.depth -= depth;
        self.expects_operand = false;
        self.deeper(1)
    }

    fn comma(&mut self) -> Result<(), String> {
        let depth = std::mem::take(&mut self.level().depth);
        self.depth -= depth;
        self.colon()
    }

    fn colon(&mut self) -> Result<(), String> {
        self.boundary(Rank::Lowest);
        let level = self.level();
        level.begins = true;
        level.joined = false;
        self.copy(1);
        self.expects_operand = true;
        Ok(())
    }

    /// A literal. One with escapes is rewritten: Python knows more of them than the engine.
    fn string(&mut self, quote: char) -> Result<(), String> {
        let rest = self.rest();
        let mut escaped = false;
        let mut end = None;
        for (at, c) in rest.char_indices().skip(1) {
            match c {
                _ if escaped => escaped = false,
                '\\' => escaped = true,
                c if c == quote => {
                    end = Some(at);
                    break;
                }
                _ => {}
            }
        }
        let end = end.ok_or("a string has no end")?;
        let literal = &rest[1..end];
        if literal.contains('\\') {
            let text = unescape(literal)?;
            self.out.push('"');
            self.out.push_str(&text.replace('\\', "\\\\").replace('"', "\\\""));
            self.out.push('"');
            self.at += end + 1;
        } else {
            self.copy(end + 1);
        }
        self.expects_operand = false;
        Ok(())
    }
}

fn name_len(text: &str) -> usize {
    text.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(text.len())
}

fn number_len(text: &str) -> usize {
    let mut len = name_len(text);
    let digits =
        |text: &str| text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    if let Some(fraction) = text[len..].strip_prefix('.')
        && digits(fraction) > 0
    {
        len += 1 + name_len(fraction);
    }
    if text[..len].ends_with(['e', 'E'])
        && !text.starts_with("0x")
        && let Some(exponent) = text[len..].strip_prefix(['+', '-'])
    {
        len += 1 + digits(exponent);
    }
    len
}

/// A string literal of Python without its quotes.
fn unescape(literal: &str) -> Result<String, String> {
    let mut out = String::with_capacity(literal.len());
    let mut chars = literal.chars().peekable();
    while let Some(c) = chars.next() {
        if c != '\\' {
            out.push(c);
            continue;
        }
        let Some(escape) = chars.next() else { break };
        let digits = match escape {
            'x' => 2,
            'u' => 4,
            'U' => 8,
            '0'..='7' => {
                let mut value = escape as u32 - '0' as u32;
                for _ in 0..2 {
                    let Some(digit) = chars.peek().and_then(|c| c.to_digit(8)) else { break };
                    value = value * 8 + digit;
                    chars.next();
                }
                out.extend(char::from_u32(value));
                continue;
            }
            _ => 0,
        };
        if digits > 0 {
            let mut code = 0;
            for _ in 0..digits {
                let digit = chars.next().and_then(|c| c.to_digit(16));
                code = code * 16
                    + digit.ok_or_else(|| format!("a bad escape \\{escape} in a string"))?;
            }
            let c = char::from_u32(code);
            out.push(c.ok_or_else(|| format!("\\{escape}{code:x} in a string is no character"))?);
            continue;
        }
        match escape {
            'n' => out.push('\n'),
            't' => out.push('\t'),
            'r' => out.push('\r'),
            'a' => out.push('\u{7}'),
            'b' => out.push('\u{8}'),
            'f' => out.push('\u{c}'),
            'v' => out.push('\u{b}'),
            '\\' | '\'' | '"' => out.push(escape),
            '\n' => {}
            'N' => return Err("\\N{…} in a string is not supported".to_owned()),
            other => {
                let _ = write!(out, "\\{other}");
            }
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expressions_are_written_for_the_engine() {
        let cases = [
            ("{{ x[a ~ b:-c % d] }}", "{{ x[__str__(a )~ __str__( b):__mod__(-c , d)] }}"),
            ("{{ 'a' % b }}", "{{ __mod__('a' , b )}}"),
            ("{{ a + b * c % -d % e + f }}", "{{ a + __mod__(__mod__(b * c , -d ), e )+ f }}"),
            ("{{ a ~ b[0] ~ c and d }}", "{{ __str__(a )~ __str__( b[0] )~ __str__( c )and d }}"),
            ("{{ 'x' ~ 'a' % b }}", "{{ __str__('x' )~ __str__( __mod__('a' , b ))}}"),
            ("{% set x = a, b %}", "{% set x = __set__( a, b )%}"),
            ("{% set n.x = () -%}", "{% set n.x = __set_attr__( () )-%}"),
            ("{% set x %}%{% endset %}", "{% set x %}%{% endset %}"),
            ("{% for (a, b) in (c, d) %}", "{% for (a, b) in __iter__( (c, d) )%}"),
            ("{% for a in b or c if a in d %}", "{% for a in __iter__( b or c ) if a in d %}"),
            ("{% for a in b recursive %}", "{% for a in __iter__( b ) recursive %}"),
            ("{% call(a, b) f((1)) %}", "{% call(a, b) f((1)) %}"),
            ("{{ x.items }}{{ x.items() }}", "{{ x.__attr__('items') }}{{ x.items() }}"),
            ("{% set n.items = 1 %}", "{% set n.items = __set_attr__( 1 )%}"),
            ("{{ f(*a, **b) }}", "{{ f(*a, **b) }}"),
            (r#"{{ 'a\x41\'"\d' }}"#, r#"{{ "aA'\"\\d" }}"#),
            (
                "{# x[1:2] #}{% raw %}{{ x[1:2] }}{% endraw %}",
                "{# x[1:2] #}{% raw %}{{ x[1:2] }}{% endraw %}",
            ),
            (
                "a\n{%- generation -%}\r\n b {% endgeneration %}",
                "a\n{%- if true -%}\n b {% endif %}",
            ),
            ("{{ x is not in [1] and x not in y }}", "{{ x is not in [1] and x not in y }}"),
            ("{{ {'a': '}}'} }}", "{{ {'a': '}}'} }}"),
        ];
        for (source, expected) in cases {
            assert_eq!(prepare(source).as_deref(), Ok(expected), "{source}");
        }
    }

    #[test]
    fn what_does_not_end_or_nests_too_deep_is_refused() {
        let many = |part: &str, n: usize| format!("{{{{ {}a }}}}", part.repeat(n));
        for source in [
            "{{ 'a".to_owned(),
            "{{ a".to_owned(),
            "{# a".to_owned(),
            "{{ (a] }}".to_owned(),
            "{{ a) }}".to_owned(),
            "{% include 'x' %}".to_owned(),
            many("not ", 6000),
            many("-", 6000),
            many("a.", 6000),
            many("1|string|", 6000),
            many("a~", 6000),
            many("a%", 6000),
            many("a if a else ", 6000),
            many("[", 6000),
            many("a[", 6000),
            format!("{{% if a %}}{}{{% endif %}}", "{% elif a %}".repeat(6000)),
        ] {
            assert!(prepare(&source).is_err(), "accepted: {}", &source[..source.len().min(40)]);
        }
        let long = format!("{{{{ [{}] }}}}", "a.b|c(1), ".repeat(2000));
        assert!(prepare(&long).is_ok(), "items beside each other are not deep");
    }
}
