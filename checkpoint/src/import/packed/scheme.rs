//! Settings in `quantization_config`.

use serde_json::Value;

use super::compressed::Compressed;
use super::declared::Declared;
use super::fp8::Fp8;
use super::qweight::Qweight;
use super::{Files, Found, Read, bitsandbytes, mxfp4};

/// Quantization scheme of a checkpoint.
#[derive(Debug, Clone)]
pub(crate) struct Scheme(Method);

/// The program that quantized it.
#[derive(Debug, Clone)]
enum Method {
    Qweight(Qweight),
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
            "gptq" => Method::Qweight(Qweight::gptq(declared)?),
            "awq" => Method::Qweight(Qweight::awq(declared)?),
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
            Method::Qweight(qweight) => qweight.gather(files),
            Method::Compressed(compressed) => compressed.gather(files),
            Method::Fp8(fp8) => fp8.gather(files),
            Method::BitsAndBytes => bitsandbytes::gather(files),
            Method::Mxfp4 => mxfp4::gather(files),
        }
    }

    /// The ends of the names of tensors that are looked for.
    pub(super) const fn sign(&self) -> &'static str {
        match &self.0 {
            Method::Qweight(_) => ".qweight",
            Method::Compressed(_) => ".weight_packed or .weight_scale",
            Method::Fp8(_) => ".weight_scale_inv or .weight_scale",
            Method::BitsAndBytes => ".weight.absmax or .SCB",
            Method::Mxfp4 => "_blocks",
        }
    }
}
