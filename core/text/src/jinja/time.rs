//! `strftime_now`: the local date and time, as `datetime.now().strftime(…)` of Python writes it.

use jiff::Zoned;
use jiff::fmt::strtime;
use minijinja::{Error, Value};

use super::python::fail;

/// `strftime_now(format)`.
pub(super) fn strftime_now(format: &str) -> Result<Value, Error> {
    strftime(format, &Zoned::now()).map(Value::from)
}

fn strftime(format: &str, time: &Zoned) -> Result<String, Error> {
    let mut spelled = String::with_capacity(format.len());
    let mut rest = format;
    while let Some(at) = rest.find('%') {
        spelled.push_str(&rest[..at]);
        let code = rest[at + 1..].chars().next();
        let len = code.map_or(0, char::len_utf8);
        match code {
            // `datetime.now()` knows no time zone.
            Some('Z' | 'z') => {}
            Some('f') => spelled.push_str("%6f"),
            // The forms of the C locale.
            Some('c') => spelled.push_str("%a %b %e %H:%M:%S %Y"),
            Some('x') => spelled.push_str("%m/%d/%y"),
            Some('X') => spelled.push_str("%H:%M:%S"),
            Some('r') => spelled.push_str("%I:%M:%S %p"),
            Some(_) => spelled.push_str(&rest[at..at + 1 + len]),
            None => spelled.push_str("%%"),
        }
        rest = &rest[at + 1 + len..];
    }
    spelled.push_str(rest);
    strtime::format(&spelled, time).map_err(|e| fail(format!("strftime_now({format:?}): {e}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Expected texts are those of `datetime(2024, 1, 5, 13, 4, 9, 250).strftime(…)`.
    #[test]
    fn dates_are_written_as_python_writes_them() {
        let time =
            jiff::civil::date(2024, 1, 5).at(13, 4, 9, 250_000).to_zoned(jiff::tz::TimeZone::UTC);
        let time = time.expect("a time");
        for (format, expected) in [
            ("%d %b %Y", "05 Jan 2024"),
            ("%A, %B %d, %Y %I:%M %p", "Friday, January 05, 2024 01:04 PM"),
            ("%e|%-d|%D|%U|%W|%j", " 5|5|01/05/24|00|01|005"),
            ("%a %H:%M:%S.%f", "Fri 13:04:09.000250"),
            ("%F %T|%y|%%|%u|%w|%G-%V", "2024-01-05 13:04:09|24|%|5|5|2024-01"),
            ("[%Z%z]", "[]"),
            ("%c|%x|%X|%R|%C|%h", "Fri Jan  5 13:04:09 2024|01/05/24|13:04:09|13:04|20|Jan"),
            ("100%", "100%"),
        ] {
            assert_eq!(strftime(format, &time).expect(format), expected, "{format}");
        }
        let error = strftime("%Y %K", &time).expect_err("no such directive");
        assert!(error.to_string().contains("%Y %K"), "{error}");
    }

    #[test]
    fn now_is_local_time() {
        let before = Zoned::now();
        let now = strftime_now("%Y-%m-%d %H:%M").expect("a date").to_string();
        let around = [before, Zoned::now()].map(|t| t.strftime("%Y-%m-%d %H:%M").to_string());
        assert!(around.contains(&now), "{now} is not in {around:?}");
    }
}
