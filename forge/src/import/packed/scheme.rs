//! What `quantization_config` says.

use serde_json::Value;

use super::awq::Awq;
use super::compressed::Compressed;
use super::fp8::Fp8;
use super::gptq::Gptq;
use super::{Files, Found, Read, bitsandbytes, mxfp4};

/// How a checkpoint is quantized.
#[derive(Debug, Clone)]
pub(crate) struct Scheme(Method);

/// The program that quantized it.
#[derive(Debug, Clone)]
enum Method {
    Gptq(Gptq),
    Awq(Awq),
    Compressed(Compressed),
    Fp8(Fp8),
    BitsAndBytes,
    Mxfp4,
}

impl Scheme {
    /// Reads the `quantization_config` of a `config.json`. None where there is none; else an error says what cannot be
    /// read.
    pub fn of(config: &Value) -> Read<Option<Self>> {
        let text = config.get("text_config").and_then(|text| text.get("quantization_config"));
        let own = config.get("quantization_config").filter(|value| !value.is_null());
        let Some(declared) = own.or(text).filter(|value| !value.is_null()) else {
            return Ok(None);
        };
        let declared = Declared(declared);
        let scheme = match declared.text("quant_method") {
            "gptq" => Method::Gptq(Gptq::of(declared)?),
            "awq" => Method::Awq(Awq::of(declared)?),
            "compressed-tensors" => Method::Compressed(Compressed::of(declared)?),
            "fp8" | "fbgemm_fp8" => Method::Fp8(Fp8::of(declared)?),
            "bitsandbytes" => Method::BitsAndBytes,
            "mxfp4" => Method::Mxfp4,
            _ => {
                let methods = "\"gptq\", \"awq\", \"compressed-tensors\", \"fp8\", \"fbgemm_fp8\", \"bitsandbytes\" \
                               or \"mxfp4\"";
                return Err(declared.bad("quant_method", methods));
            }
        };
        Ok(Some(Self(scheme)))
    }

    /// All weights that are quantized.
    pub(super) fn gather(&self, files: &Files<'_>) -> Read<Vec<Found>> {
        match &self.0 {
            Method::Gptq(gptq) => gptq.gather(files),
            Method::Awq(awq) => awq.gather(files),
            Method::Compressed(compressed) => compressed.gather(files),
            Method::Fp8(fp8) => fp8.gather(files),
            Method::BitsAndBytes => bitsandbytes::gather(files),
            Method::Mxfp4 => mxfp4::gather(files),
        }
    }

    /// The ends of the names of tensors that are looked for.
    pub(super) const fn sign(&self) -> &'static str {
        match &self.0 {
            Method::Gptq(_) | Method::Awq(_) => ".qweight",
            Method::Compressed(_) => ".weight_packed or .weight_scale",
            Method::Fp8(_) => ".weight_scale_inv or .weight_scale",
            Method::BitsAndBytes => ".weight.absmax or .SCB",
            Method::Mxfp4 => "_blocks",
        }
    }
}

/// An object of the configuration.
#[derive(Debug, Clone, Copy)]
pub(super) struct Declared<'a>(pub &'a Value);

impl<'a> Declared<'a> {
    pub fn get(self, key: &str) -> Option<&'a Value> {
        self.0.get(key).filter(|value| !value.is_null())
    }

    /// A text; empty without one.
    pub fn text(self, key: &str) -> &'a str {
        self.get(key).and_then(Value::as_str).unwrap_or_default()
    }

    pub fn number(self, key: &str) -> Option<i64> {
        self.get(key).and_then(Value::as_i64)
    }

    /// What is wrong with the value of a key.
    pub fn bad(self, key: &str, expected: &str) -> String {
        let found = self.0.get(key).unwrap_or(&Value::Null);
        format!("quantization_config: {key} is {found}, expected {expected}")
    }

    /// Inputs of a group; none for all inputs of an output.
    pub fn group(self, keys: [&'static str; 2]) -> Read<Option<usize>> {
        let expected = "a multiple of 32, or -1";
        match keys.iter().find_map(|key| self.number(key)) {
            Some(-1) => Ok(None),
            Some(size) => match usize::try_from(size) {
                Ok(size) if size > 0 && size.is_multiple_of(32) => Ok(Some(size)),
                _ => Err(self.bad(keys[0], expected)),
            },
            None => Err(self.bad(keys[0], expected)),
        }
    }
}
