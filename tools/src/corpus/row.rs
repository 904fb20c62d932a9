//! One text of the input, and its vector in the output.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use qhx::Role;
use serde::Serialize;

/// Bytes of the longest line, and of the longest text of a table. No encoder takes a text near it.
pub const MAX_LINE: usize = 4 << 20;

/// One text.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Row {
    /// Place in the input, from 0.
    pub index: u64,
    /// The text to embed, or the location of the image.
    pub text: String,
    /// The text is the file of an image, or a data URL, and the image is embedded.
    pub image: bool,
    /// Role of the text, which decides its prefix.
    pub role: Role,
}

/// One line of the output.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Vector<'a> {
    /// Place of the text in the input, from 0.
    pub index: u64,
    /// The text, without its prefix; none of an image.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text: Option<&'a str>,
    /// The image's file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image: Option<&'a str>,
    /// Its vector.
    pub embedding: &'a [f32],
    /// The weights of its tokens by their ids.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sparse: Option<&'a BTreeMap<u32, f32>>,
    /// The vectors of its tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub multi: Option<&'a [Vec<f32>]>,
}

impl<'a> Vector<'a> {
    /// The vector of a row.
    pub fn of(row: &'a Row, embedding: &'a [f32]) -> Self {
        let text = Some(row.text.as_str());
        let (text, image) = if row.image { (None, text) } else { (text, None) };
        Self { index: row.index, text, image, embedding, sparse: None, multi: None }
    }

    /// The same with weights and vectors of tokens.
    #[must_use]
    pub fn with_tokens(
        self,
        sparse: Option<&'a BTreeMap<u32, f32>>,
        multi: Option<&'a [Vec<f32>]>,
    ) -> Self {
        Self { sparse, multi, ..self }
    }
}

/// One part of an input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shard {
    index: u64,
    count: u64,
}

impl Shard {
    /// Part `index` of `count`; `None` where `index` is not below `count`.
    pub fn new(index: u64, count: u64) -> Option<Self> {
        (index < count).then_some(Self { index, count })
    }

    /// Number of the first `rows` rows that belong to this part.
    pub(super) fn share(self, rows: u64) -> u64 {
        rows / self.count + u64::from(rows % self.count > self.index)
    }

    /// True for rows of this part.
    pub fn has(self, row: u64) -> bool {
        row % self.count == self.index
    }

    /// Rows from `row` on that come before the first of this part.
    pub(super) fn others_before(self, row: u64) -> u64 {
        let part = row % self.count;
        if part <= self.index { self.index - part } else { self.count - part + self.index }
    }
}

impl fmt::Display for Shard {
    /// `0/4`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.index, self.count)
    }
}

impl FromStr for Shard {
    type Err = String;

    /// `0/4` to `3/4`.
    fn from_str(text: &str) -> Result<Self, String> {
        let parts = text.split_once('/');
        let parts = parts.and_then(|(i, n)| Some((i.parse().ok()?, n.parse().ok()?)));
        let shard = parts.and_then(|(index, count)| Self::new(index, count));
        shard.ok_or_else(|| "expected I/N with I below N, such as 0/4 to 3/4".to_owned())
    }
}

/// Defaults for the rows of an input.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RowOptions {
    /// Role of a text if its line does not name one.
    pub role: Role,
    /// The part of the input that is embedded; all of it if it is `None`.
    pub shard: Option<Shard>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_divide_the_rows() {
        let shards: Vec<Shard> = (0..3).map(|i| format!("{i}/3").parse().unwrap()).collect();
        for row in 0..20 {
            assert_eq!(shards.iter().filter(|s| s.has(row)).count(), 1);
            for shard in &shards {
                let before = (row..).take_while(|&row| !shard.has(row)).count();
                assert_eq!(shard.others_before(row), before as u64);
            }
        }
        for bad in ["3/3", "0/0", "1", "a/b", "-1/2", ""] {
            assert!(bad.parse::<Shard>().is_err(), "{bad}");
        }
    }
}
