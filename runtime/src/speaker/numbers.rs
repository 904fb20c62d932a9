//! Numbers as English words.

const SMALL: [&str; 20] = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
];
const TENS: [&str; 10] =
    ["", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"];
const LARGE: [(u64, &str); 4] = [
    (1_000_000_000_000, "trillion"),
    (1_000_000_000, "billion"),
    (1_000_000, "million"),
    (1000, "thousand"),
];
/// Digits of the longest number that is read as one; longer ones are read digit by digit.
const MAX_DIGITS: usize = 15;

/// A number of digits, with commas between thousands and perhaps a fraction, as words.
pub(super) fn words(number: &str) -> String {
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let whole: String = whole.chars().filter(char::is_ascii_digit).collect();
    let mut words = Vec::new();
    let apart = whole.len() > MAX_DIGITS || (whole.len() > 1 && whole.starts_with('0'));
    match whole.parse() {
        Ok(value) if !apart => cardinal(value, &mut words),
        _ => words.extend(digits(&whole)),
    }
    if !fraction.is_empty() {
        words.push("point");
        words.extend(digits(fraction));
    }
    words.join(" ")
}

fn digits(text: &str) -> impl Iterator<Item = &'static str> {
    text.chars().filter_map(|digit| SMALL.get(digit.to_digit(10)? as usize).copied())
}

fn cardinal(value: u64, words: &mut Vec<&'static str>) {
    if let Some((unit, name)) = LARGE.iter().find(|(unit, _)| value >= *unit) {
        cardinal(value / unit, words);
        words.push(name);
        if !value.is_multiple_of(*unit) {
            cardinal(value % unit, words);
        }
        return;
    }
    match value {
        100.. => {
            words.extend([SMALL[(value / 100) as usize], "hundred"]);
            if !value.is_multiple_of(100) {
                cardinal(value % 100, words);
            }
        }
        20.. => {
            words.push(TENS[(value / 10) as usize]);
            if !value.is_multiple_of(10) {
                words.push(SMALL[(value % 10) as usize]);
            }
        }
        _ => words.push(SMALL[value as usize]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_as_words() {
        for (number, expected) in [
            ("0", "zero"),
            ("17", "seventeen"),
            ("342", "three hundred forty two"),
            ("1,000,001", "one million one"),
            ("20000", "twenty thousand"),
            ("3.14", "three point one four"),
            ("007", "zero zero seven"),
            (
                "1234567890123456",
                "one two three four five six seven eight nine zero one two three four five six",
            ),
        ] {
            assert_eq!(words(number), expected);
        }
    }
}
