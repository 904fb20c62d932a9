//! The options of sampling, validated.

use std::collections::BTreeMap;

use qhx_base::{Error, ErrorKind, Result, error, setters};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Sampling parameters for the next token. The default is greedy: the most likely token.
///
/// ```
/// let sampling = qhx_core::sampling::SamplingParams::default().temperature(0.7).top_p(0.9).seed(1);
/// assert!(sampling.validate().is_ok() && !sampling.is_greedy());
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[non_exhaustive]
pub struct SamplingParams {
    /// Divides the logits. 0 is greedy.
    pub temperature: f32,
    /// Keeps this many of the most likely tokens. 0 keeps all.
    pub top_k: usize,
    /// Keeps the most likely tokens whose probabilities sum to this. 1 keeps all.
    pub top_p: f32,
    /// Keeps tokens at least this likely relative to the most likely one. 0 keeps all.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens in prompt or answer. 1 is off.
    pub repetition_penalty: f32,
    /// Subtracted from the logits of tokens in the answer. 0 is off.
    pub presence_penalty: f32,
    /// Subtracted from the logits of tokens in the answer, once for each occurrence. 0 is off.
    pub frequency_penalty: f32,
    /// Penalties see this many of the last tokens. 0 means all.
    pub penalty_window: usize,
    /// Added to the logits of tokens, before penalties and all else.
    pub logit_bias: BTreeMap<u32, f32>,
    /// Makes the choices repeatable. Without one, a seed is drawn.
    pub seed: Option<u64>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            penalty_window: 0,
            logit_bias: BTreeMap::new(),
            seed: None,
        }
    }
}

impl SamplingParams {
    setters! {
        /// Divides the logits. 0 is greedy.
        temperature: f32,
        /// Keeps this many of the most likely tokens. 0 keeps all.
        top_k: usize,
        /// Keeps the most likely tokens whose probabilities sum to this. 1 keeps all.
        top_p: f32,
        /// Keeps tokens at least this likely relative to the most likely one. 0 keeps all.
        min_p: f32,
        /// Divides positive and multiplies negative logits of tokens in prompt or answer. 1 is off.
        repetition_penalty: f32,
        /// Subtracted from the logits of tokens in the answer. 0 is off.
        presence_penalty: f32,
        /// Subtracted from the logits of tokens in the answer, once for each occurrence. 0 is off.
        frequency_penalty: f32,
        /// Penalties see this many of the last tokens. 0 means all.
        penalty_window: usize,
        /// Makes the choices repeatable. Without one, a seed is drawn.
        seed(seed: impl Into<Option<u64>>) => seed = seed.into(),
    }

    /// Added to the logits of tokens, before penalties and all else.
    ///
    /// ```
    /// // Token 42 is never chosen.
    /// let sampling = qhx_core::sampling::SamplingParams::default().logit_bias([(42, -100.0)]);
    /// assert!(sampling.is_greedy() && !sampling.is_plain());
    /// ```
    #[must_use]
    pub fn logit_bias(mut self, logit_bias: impl IntoIterator<Item = (u32, f32)>) -> Self {
        self.logit_bias.extend(logit_bias);
        self
    }

    /// With the options of a JSON object, named as the fields are, and all others as they were.
    ///
    /// ```
    /// # use qhx_core::sampling::SamplingParams;
    /// let given = serde_json::json!({"temperature": 0.2});
    /// let sampling = SamplingParams::default().top_k(20).with(given.as_object().unwrap())?;
    /// assert_eq!((sampling.temperature, sampling.top_k), (0.2, 20));
    /// # Ok::<_, qhx_base::Error>(())
    /// ```
    ///
    /// # Errors
    /// When an option is unknown, of another type or out of range.
    pub fn with(&self, given: &Map<String, Value>) -> Result<Self> {
        let wrong = |e| Error::caused(ErrorKind::Usage, "sampling", e);
        let mut all = serde_json::to_value(self).map_err(wrong)?;
        if let Some(all) = all.as_object_mut() {
            all.extend(given.clone());
        }
        let all: Self = serde_json::from_value(all).map_err(wrong)?;
        all.validate()?;
        Ok(all)
    }

    /// Checks every option.
    ///
    /// # Errors
    /// When an option is out of range; the error names the option, its value and what is allowed.
    pub fn validate(&self) -> Result<()> {
        let check = |name: &str, value: f32, ok: bool, expected: &str| {
            if ok && value.is_finite() {
                return Ok(());
            }
            Err(error!(Usage, "option {name}: expected {expected}, found {value}"))
        };
        let Self { temperature: t, top_p, min_p, repetition_penalty: r, .. } = *self;
        for (token, &bias) in &self.logit_bias {
            let name = format!("logit_bias of token {token}");
            check(&name, bias, (-100.0..=100.0).contains(&bias), "a number from −100 to 100")?;
        }
        let (presence, frequency) = (self.presence_penalty, self.frequency_penalty);
        let small = |v: f32| (-100.0..=100.0).contains(&v);
        // Below this a temperature would overflow the division; such a choice is greedy anyway.
        let positive = t == 0.0 || (1e-4..=100.0).contains(&t);
        check("temperature", t, positive, "0 (greedy) or a number from 0.0001 to 100")?;
        check("top_p", top_p, top_p > 0.0 && top_p <= 1.0, "a number above 0 and up to 1")?;
        check("min_p", min_p, (0.0..=1.0).contains(&min_p), "a number from 0 to 1")?;
        let range = (0.01..=100.0).contains(&r);
        check("repetition_penalty", r, range, "a number from 0.01 to 100 (1 is off)")?;
        let expected = "a number from −100 to 100 (0 is off)";
        check("presence_penalty", presence, small(presence), expected)?;
        check("frequency_penalty", frequency, small(frequency), expected)
    }

    /// True when the most likely token is taken.
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0 || self.top_k == 1
    }

    /// True when the token with the largest logit is taken, as the model gives it.
    pub fn is_plain(&self) -> bool {
        self.is_greedy() && !self.has_penalties() && self.logit_bias.is_empty()
    }

    /// True when a logit depends on earlier tokens.
    pub fn has_penalties(&self) -> bool {
        self.repetition_penalty != 1.0
            || self.presence_penalty != 0.0
            || self.frequency_penalty != 0.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_named_when_they_are_wrong() {
        let cases = [
            (r#"{"temperature": -1}"#, "option temperature: expected 0 (greedy) or"),
            (r#"{"temperature": 1e-9}"#, "option temperature: expected 0 (greedy) or"),
            (r#"{"temperature": 1e38}"#, "option temperature: expected"),
            (r#"{"top_p": 0}"#, "option top_p: expected a number above 0 and up to 1, found 0"),
            (r#"{"top_p": 1.5}"#, "option top_p: expected a number above 0 and up to 1, found 1.5"),
            (r#"{"min_p": 2}"#, "option min_p: expected a number from 0 to 1, found 2"),
            (r#"{"repetition_penalty": 0}"#, "option repetition_penalty: expected"),
            (r#"{"presence_penalty": 1000}"#, "option presence_penalty: expected"),
            (r#"{"frequency_penalty": -101}"#, "option frequency_penalty: expected"),
            (
                r#"{"logit_bias": {"7": 101}}"#,
                "option logit_bias of token 7: expected a number from",
            ),
        ];
        for (json, expected) in cases {
            let params: SamplingParams = serde_json::from_str(json).unwrap();
            let error = params.validate().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Usage);
            assert!(error.message().starts_with(expected), "{json}: {error}");
        }
        let unknown = serde_json::from_str::<SamplingParams>(r#"{"temprature": 1}"#).unwrap_err();
        assert!(unknown.to_string().contains("temprature"));
        let full = SamplingParams { temperature: 0.7, seed: Some(4), ..SamplingParams::default() };
        full.validate().unwrap();
        let text = serde_json::to_string(&full).unwrap();
        assert_eq!(serde_json::from_str::<SamplingParams>(&text).unwrap(), full);
    }
}
