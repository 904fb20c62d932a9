//! The rotary embedding that `config.json` describes, resolved for one length of the context.
//!
//! Arithmetic: `transformers`, `modeling_rope_utils.py`. What depends on the length of the sequence there (`dynamic`,
//! `longrope`) is what it would be for a sequence as long as the context that the bundle is made for.

use qhx_base::Result;
use serde_json::{Map, Value, json};

use super::classes::Class;
use crate::kit::Reader;

/// Rotations of a pair within the original context from which on YaRN leaves its frequency, and below which it is
/// divided (`beta_fast`, `beta_slow`).
const BETAS: [f64; 2] = [32.0, 1.0];

/// Rotary embeddings of kinds of layers, in the newer spelling.
const FULL: &str = "rope_parameters.full_attention";
const SLIDING: &str = "rope_parameters.sliding_attention";
/// A switch of YaRN beside them.
const TRUNCATE: &str = "rope_parameters.truncate";

/// A rotary embedding.
#[derive(Debug, Clone)]
pub(super) struct Rope {
    /// Elements of a head that turn.
    pub rotary: usize,
    /// Base of the frequencies.
    pub theta: f64,
    /// `params.rope_scaling` of the manifest, where frequencies are scaled.
    pub scaling: Option<Value>,
    /// Longest context that it is made for.
    pub max_positions: Option<usize>,
}

/// Growth of queries with their position p: they are multiplied by `1 + beta · ln(1 + ⌊p / original⌋)`
/// (`get_llama_4_attn_scale`).
#[derive(Debug, Clone, Copy)]
pub(super) struct Growth {
    pub beta: f64,
    pub original: f64,
}

impl Growth {
    /// Reads the keys beside those of the rotary embedding; none where a context of `max_ctx` tokens ends before
    /// queries grow.
    pub fn read(reader: &Reader<'_>, class: &Class, max_ctx: usize) -> Result<Option<Self>> {
        if !class.growing {
            return Ok(None);
        }
        let place = reader.rope_key();
        let keys = Keys { reader, place, max_positions: None };
        let (beta, original) = ("llama_4_scaling_beta", "original_max_position_embeddings");
        if keys.is_zero(beta) {
            return Ok(None);
        }
        let growth = Self { beta: keys.number(beta)?, original: keys.number(original)? };
        Ok((max_ctx as f64 > growth.original).then_some(growth))
    }
}

/// The keys of the object that describes it.
struct Keys<'a> {
    reader: &'a Reader<'a>,
    place: &'static str,
    max_positions: Option<usize>,
}

impl Rope {
    /// Keys of `params.local` in the manifest.
    pub fn params(&self) -> Map<String, Value> {
        let mut params = Map::new();
        params.insert("rotary_dim".to_owned(), json!(self.rotary));
        params.insert("rope_theta".to_owned(), json!(self.theta));
        if let Some(scaling) = &self.scaling {
            params.insert("rope_scaling".to_owned(), scaling.clone());
        }
        params
    }

    /// Reads and checks; `dim` is the width of a head, `max_ctx` the context that the bundle is made for.
    pub fn read(reader: &Reader<'_>, class: &Class, dim: usize, max_ctx: usize) -> Result<Self> {
        let place = match (reader.rope_key(), class.ropes) {
            ("rope_parameters", true) => FULL,
            (place, _) => place,
        };
        Self::at(reader, class, place, dim, max_ctx)
    }

    /// The same of sliding layers that have one of their own: the older spelling has one base for all, and scales that
    /// of full layers alone.
    pub fn read_local(
        reader: &Reader<'_>,
        class: &Class,
        dim: usize,
        max_ctx: usize,
    ) -> Result<Self> {
        if let Some(kind) = reader.get("rope_parameters.rope_type") {
            let expected = "an object for full_attention and one for sliding_attention";
            return Err(reader.bad("rope_parameters.rope_type", kind, expected));
        }
        Self::at(reader, class, SLIDING, dim, max_ctx)
    }

    fn at(
        reader: &Reader<'_>,
        class: &Class,
        place: &'static str,
        dim: usize,
        max_ctx: usize,
    ) -> Result<Self> {
        let max_positions = reader.maybe_size("max_position_embeddings")?;
        if class.sinks && reader.get(place).is_none() {
            return Err(reader.fault(format!("{place} is missing, expected rope type \"yarn\"")));
        }
        let keys = Keys { reader, place, max_positions };
        let theta = reader.positive(&[&keys.at("rope_theta"), "rope_theta"])?;
        let mut rope = Self {
            rotary: rotary(reader, class, dim, &keys)?,
            theta: theta.unwrap_or(class.rope_theta),
            scaling: None,
            max_positions,
        };
        let names = ["rope_type", "type"].map(|key| keys.at(key));
        let found = reader.first(&[&names[0], &names[1]]);
        match found.map_or(Some("default"), |(_, kind)| kind.as_str()) {
            Some("default") => {}
            // How Phi-3's first configurations call it.
            Some("su" | "yarn") if class.joined => keys.longrope(&mut rope, class, max_ctx)?,
            Some("longrope") => keys.longrope(&mut rope, class, max_ctx)?,
            Some("linear") => {
                let factor = keys.number("factor")?;
                rope.scaling = Some(json!({"rope_type": "linear", "factor": factor}));
            }
            Some("llama3") => rope.scaling = Some(keys.llama3()?),
            Some("dynamic") if class.late_norms && keys.maybe_none("alpha")?.is_some() => {
                keys.ntk_alpha(&mut rope)?;
            }
            Some("dynamic") => keys.dynamic(&mut rope, max_ctx)?,
            Some("yarn") => keys.yarn(&mut rope, class)?,
            _ => {
                let kind = found.map_or(&Value::Null, |(_, kind)| kind);
                return Err(reader.fault(format!(
                    "{}: rope type {kind}, expected \"default\", \"linear\", \"llama3\", \"dynamic\", \"yarn\" or \
                     \"longrope\"",
                    keys.place
                )));
            }
        }
        Ok(rope)
    }
}

/// Elements of a head that turn: all, or the first of them.
fn rotary(reader: &Reader<'_>, class: &Class, dim: usize, keys: &Keys<'_>) -> Result<usize> {
    let inner = keys.at("partial_rotary_factor");
    let key = reader.first(&[&inner, "partial_rotary_factor"]).map(|(key, _)| key);
    let Some(share) = key.map(|key| reader.positive(&[key])).transpose()?.flatten() else {
        return Ok(dim);
    };
    let rotary = (dim as f64 * share) as usize;
    let partly = share == 1.0 || class.joined && share < 1.0;
    if partly && rotary >= 2 && rotary.is_multiple_of(2) {
        return Ok(rotary);
    }
    let expected = match class.joined {
        true => format!("a share of the {dim} elements of a head that is an even number"),
        false => "1, since this class turns whole heads".to_owned(),
    };
    Err(reader.fault(format!("partial_rotary_factor is {share}, expected {expected}")))
}

impl Keys<'_> {
    fn at(&self, key: &str) -> String {
        format!("{}.{key}", self.place)
    }

    fn maybe(&self, key: &str) -> Result<Option<f64>> {
        self.reader.positive(&[&self.at(key)])
    }

    fn is_zero(&self, key: &str) -> bool {
        self.reader.get(&self.at(key)).and_then(Value::as_f64) == Some(0.0)
    }

    /// The same, where 0 is as good as nothing.
    fn maybe_none(&self, key: &str) -> Result<Option<f64>> {
        if self.is_zero(key) { Ok(None) } else { self.maybe(key) }
    }

    fn number(&self, key: &str) -> Result<f64> {
        let missing =
            || self.reader.fault(format!("{} is missing, expected a number", self.at(key)));
        self.maybe(key)?.ok_or_else(missing)
    }

    /// The context that the model was trained on at first.
    fn original(&self, own: Option<f64>) -> Result<f64> {
        let beside = self.reader.positive(&["original_max_position_embeddings"])?.or(own);
        let inside = self.maybe("original_max_position_embeddings")?;
        match beside.or(inside).or(self.max_positions.map(|positions| positions as f64)) {
            Some(positions) if positions > 1.0 => Ok(positions),
            _ => self.number("original_max_position_embeddings"),
        }
    }

    /// `factor`, or by how much the context was extended.
    fn factor(&self, original: f64) -> Result<f64> {
        match (self.maybe("factor")?, self.max_positions) {
            (None, Some(positions)) => Ok(positions as f64 / original),
            _ => self.number("factor"),
        }
    }

    /// `_compute_llama3_parameters`, of which the host does the arithmetic.
    fn llama3(&self) -> Result<Value> {
        let (low, high) = (self.number("low_freq_factor")?, self.number("high_freq_factor")?);
        if high <= low {
            return Err(self.reader.fault(format!(
                "{}: low_freq_factor {low} and high_freq_factor {high}, expected the second to be larger",
                self.place
            )));
        }
        Ok(json!({
            "rope_type": "llama3",
            "factor": self.number("factor")?,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": self.original(None)?,
        }))
    }

    /// `_compute_dynamic_ntk_parameters`: another base, where the context is longer than what the model was trained on.
    fn dynamic(&self, rope: &mut Rope, max_ctx: usize) -> Result<()> {
        let factor = self.number("factor")?;
        let Some(positions) = self.max_positions.filter(|_| rope.rotary > 2) else {
            return Err(self.reader.fault(format!(
                "{}: rope type \"dynamic\" with {} elements that turn and no max_position_embeddings",
                self.place, rope.rotary
            )));
        };
        let (dim, length) = (rope.rotary as f64, max_ctx.max(positions) as f64);
        let stretch = factor * length / positions as f64 - (factor - 1.0);
        rope.theta *= stretch.powf(dim / (dim - 2.0));
        rope.max_positions = Some((positions as f64 * factor.max(1.0)) as usize);
        Ok(())
    }

    /// `compute_ntk_alpha_rope_parameters` of HunYuan: another base, whatever the length.
    fn ntk_alpha(&self, rope: &mut Rope) -> Result<()> {
        let (alpha, dim) = (self.number("alpha")?, rope.rotary as f64);
        if rope.rotary <= 2 {
            return Err(self
                .reader
                .fault(format!("{}: alpha with 2 elements that turn", self.place)));
        }
        rope.theta *= alpha.powf(dim / (dim - 2.0));
        Ok(())
    }

    /// `_compute_yarn_parameters` (Peng et al. 2023, arXiv 2309.00071).
    fn yarn(&self, rope: &mut Rope, class: &Class) -> Result<()> {
        let original = self.original(None)?;
        let factor = self.factor(original)?;
        let mscale = |by: f64| if factor <= 1.0 { 1.0 } else { 0.1 * by * factor.ln() + 1.0 };
        let attention = match self.maybe("attention_factor")? {
            Some(attention) => attention,
            None => match (self.maybe_none("mscale")?, self.maybe_none("mscale_all_dim")?) {
                (Some(one), Some(all)) => mscale(one) / mscale(all),
                _ => mscale(1.0),
            },
        };
        let dim = rope.rotary as f64;
        // The pair that turns this often within the original context.
        let pair = |turns: f64| {
            dim * (original / (turns * 2.0 * std::f64::consts::PI)).ln() / (2.0 * rope.theta.ln())
        };
        let [fast, slow] = BETAS;
        let mut low = pair(self.maybe("beta_fast")?.unwrap_or(fast));
        let mut high = pair(self.maybe("beta_slow")?.unwrap_or(slow));
        // Not inside the object of a kind of layers, where `transformers` does not look.
        let truncate = if class.ropes { TRUNCATE.to_owned() } else { self.at("truncate") };
        if self.reader.flag_or(&truncate, true)? {
            (low, high) = (low.floor(), high.ceil());
        }
        (low, high) = (low.max(0.0), high.min(dim - 1.0));
        if low == high {
            high += 0.001;
        }
        let divisor = |at: usize| {
            let divided = ((at as f64 - low) / (high - low)).clamp(0.0, 1.0);
            1.0 / (divided / factor + (1.0 - divided))
        };
        let factors: Vec<_> = (0..rope.rotary / 2).map(divisor).collect();
        rope.scaling = Some(listed(&factors, attention));
        let reach = (original * factor) as usize;
        rope.max_positions = rope.max_positions.map(|positions| positions.max(reach));
        Ok(())
    }

    /// `_compute_longrope_parameters` (Ding et al. 2024, arXiv 2402.13753).
    fn longrope(&self, rope: &mut Rope, class: &Class, max_ctx: usize) -> Result<()> {
        let original = self.original(class.joined.then_some(4096.0).filter(|_| !self.inside()))?;
        let factor = self.factor(original)?;
        let attention = match self.maybe("attention_factor")? {
            Some(attention) => attention,
            None if factor <= 1.0 => 1.0,
            None => (1.0 + factor.ln() / original.ln()).sqrt(),
        };
        let key = if max_ctx as f64 > original { "long_factor" } else { "short_factor" };
        let list = self.reader.get(&self.at(key)).and_then(Value::as_array);
        let positive =
            |number: &Value| number.as_f64().filter(|n| (*n as f32).is_normal() && *n > 0.0);
        let factors: Option<Vec<f64>> = list.and_then(|list| list.iter().map(positive).collect());
        let pairs = rope.rotary / 2;
        let Some(factors) = factors.filter(|factors| factors.len() == pairs) else {
            let found =
                list.map_or("missing".to_owned(), |list| format!("a list of {}", list.len()));
            return Err(self.reader.fault(format!(
                "{} is {found}, expected {pairs} positive numbers, one for each pair that turns",
                self.at(key)
            )));
        };
        rope.scaling = Some(listed(&factors, attention));
        Ok(())
    }

    fn inside(&self) -> bool {
        self.reader.get(&self.at("original_max_position_embeddings")).is_some()
    }
}

/// The manifest's `rope_scaling` with a factor for each pair.
fn listed(factors: &[f64], attention: f64) -> Value {
    json!({"rope_type": "factors", "factors": factors, "attention_factor": attention})
}
