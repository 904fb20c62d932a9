//! Element types and encodings: the library's numbers and qhx's names.

use super::sys::{self, AxisScaleOffset, Encoding, QuantizeParams, ScaleOffset};
use crate::{DType, Quantization};

const DTYPES: [(u32, DType); 19] = [
    (0x008, DType::I8),
    (0x016, DType::I16),
    (0x032, DType::I32),
    (0x064, DType::I64),
    (0x108, DType::U8),
    (0x116, DType::U16),
    (0x132, DType::U32),
    (0x164, DType::U64),
    (0x216, DType::F16),
    (0x226, DType::Bf16),
    (0x232, DType::F32),
    (0x264, DType::F64),
    (0x308, DType::SFixed8),
    (0x316, DType::SFixed16),
    (0x332, DType::SFixed32),
    (0x408, DType::UFixed8),
    (0x416, DType::UFixed16),
    (0x432, DType::UFixed32),
    (0x508, DType::Bool),
];

/// qhx's name of the library's number.
pub(crate) fn dtype(code: u32) -> Option<DType> {
    DTYPES.iter().find(|(c, _)| *c == code).map(|(_, dtype)| *dtype)
}

/// The library's number of an element type.
pub(crate) fn dtype_code(dtype: DType) -> u32 {
    DTYPES.iter().find(|(_, d)| *d == dtype).map_or(sys::UNDEFINED, |(code, _)| *code)
}

/// An encoding in the library's layout. `values` holds what a per-axis encoding points to and has
/// to outlive the use of the result.
pub(crate) fn encode(quantization: &Quantization, values: &mut Vec<ScaleOffset>) -> QuantizeParams {
    match quantization {
        Quantization::PerTensor { scale, offset } => QuantizeParams {
            definition: sys::QUANT_DEFINED,
            encoding: sys::ENCODING_SCALE_OFFSET,
            value: Encoding { scale_offset: ScaleOffset { scale: *scale, offset: *offset } },
        },
        Quantization::PerAxis { axis, scales, offsets } => {
            *values = scales
                .iter()
                .enumerate()
                .map(|(i, &scale)| ScaleOffset {
                    scale,
                    offset: offsets.get(i).copied().unwrap_or(0),
                })
                .collect();
            let mut value = Encoding { opaque: [0; 4] };
            value.axis = AxisScaleOffset {
                axis: i32::try_from(*axis).unwrap_or(i32::MAX),
                count: u32::try_from(values.len()).unwrap_or(u32::MAX),
                values: values.as_ptr(),
            };
            QuantizeParams {
                definition: sys::QUANT_DEFINED,
                encoding: sys::ENCODING_AXIS_SCALE_OFFSET,
                value,
            }
        }
        Quantization::None | Quantization::Other { .. } => QuantizeParams::NONE,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_has_one_name_and_back() {
        for (code, name) in DTYPES {
            assert_eq!(dtype(code), Some(name));
            assert_eq!(dtype_code(name), code);
        }
        // The low hexadecimal digits are the decimal width, but for bfloat16.
        for (code, name) in DTYPES.into_iter().filter(|(_, d)| *d != DType::Bf16) {
            assert_eq!(format!("{:x}", code & 0xff), (name.size() * 8).to_string());
        }
    }
}
