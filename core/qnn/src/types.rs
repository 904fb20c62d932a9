//! Element types and encodings: the library's numbers and qhx's names.

use qhx_qnn_sys::{self as sys, AxisScaleOffset, Encoding, QuantizeParams, ScaleOffset};
use qhx_types::{DType, Quantization};

const DTYPES: [(u32, DType); 19] = [
    (sys::TYPE_INT_8, DType::I8),
    (sys::TYPE_INT_16, DType::I16),
    (sys::TYPE_INT_32, DType::I32),
    (sys::TYPE_INT_64, DType::I64),
    (sys::TYPE_UINT_8, DType::U8),
    (sys::TYPE_UINT_16, DType::U16),
    (sys::TYPE_UINT_32, DType::U32),
    (sys::TYPE_UINT_64, DType::U64),
    (sys::TYPE_FLOAT_16, DType::F16),
    (sys::TYPE_BFLOAT_16, DType::Bf16),
    (sys::TYPE_FLOAT_32, DType::F32),
    (sys::TYPE_FLOAT_64, DType::F64),
    (sys::TYPE_SFIXED_8, DType::SFixed8),
    (sys::TYPE_SFIXED_16, DType::SFixed16),
    (sys::TYPE_SFIXED_32, DType::SFixed32),
    (sys::TYPE_UFIXED_8, DType::UFixed8),
    (sys::TYPE_UFIXED_16, DType::UFixed16),
    (sys::TYPE_UFIXED_32, DType::UFixed32),
    (sys::TYPE_BOOL, DType::Bool),
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
        _ => QuantizeParams::NONE,
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
