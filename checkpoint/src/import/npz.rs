//! Files of `numpy.savez`: a ZIP archive of stored arrays, `NAME.npy` each.
//!
//! The format of an array is that of NEP 1: eight bytes, the length of a header, and the header, a Python dictionary.

use safetensors::tensor::Dtype;

use super::torch::{self, Found};

/// Beginning of an array.
const MAGIC: &[u8] = b"\x93NUMPY";
/// Element types that are read, as the header has them.
const TYPES: [(&str, Dtype, usize); 2] = [("<f4", Dtype::F32, 4), ("<f2", Dtype::F16, 2)];

/// The arrays of a file.
pub(crate) fn tensors(file: &[u8]) -> Result<Vec<Found>, String> {
    let mut found = Vec::new();
    for (name, range) in torch::entries(file)? {
        let Some(name) = name.strip_suffix(".npy") else { continue };
        let array = file.get(range.clone()).unwrap_or_default();
        let (dtype, shape, header) = header(array)
            .ok_or_else(|| format!("array {name} has no header, expected one of NumPy"))??;
        let size = TYPES.iter().find(|(_, known, _)| *known == dtype).map_or(1, |(.., size)| *size);
        let expected = shape.iter().try_fold(size, |n, d| n.checked_mul(*d));
        let bytes = range.start + header..range.end;
        if expected != Some(bytes.len()) {
            return Err(format!("array {name} has {} bytes, expected {expected:?}", bytes.len()));
        }
        found.push(Found { name: name.to_owned(), dtype, shape, bytes });
    }
    Ok(found)
}

/// Element type, sizes and length of the header.
type Header = (Dtype, Vec<usize>, usize);

/// The header of an array; none where there is none.
fn header(array: &[u8]) -> Option<Result<Header, String>> {
    let rest = array.strip_prefix(MAGIC)?;
    let (&[major, _], rest) = rest.split_first_chunk()?;
    let (length, before): (usize, usize) = match major {
        1 => (usize::from(u16::from_le_bytes(*rest.first_chunk()?)), 10),
        _ => (usize::try_from(u32::from_le_bytes(*rest.first_chunk()?)).ok()?, 12),
    };
    let text = std::str::from_utf8(array.get(before..before.checked_add(length)?)?).ok()?;
    let behind =
        |key: &str| text.split_once(key).map(|(_, rest)| rest.trim_start_matches([' ', ':']));
    let kind = behind("'descr'")?.strip_prefix('\'')?.split('\'').next()?;
    let sizes = behind("'shape'")?.strip_prefix('(')?.split(')').next()?;
    let sizes = sizes.split(',').map(str::trim).filter(|size| !size.is_empty());
    let shape: Option<Vec<usize>> = sizes.map(|size| size.parse().ok()).collect();
    let known = TYPES.iter().find(|(name, ..)| *name == kind);
    Some(match (known, behind("'fortran_order'")?.starts_with("False")) {
        (Some((_, dtype, _)), true) => Ok((*dtype, shape?, before + length)),
        (None, _) => Err(format!("an array of {kind:?}, expected \"<f4\" or \"<f2\"")),
        (_, false) => Err("an array in the order of Fortran, expected that of C".to_owned()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_of_arrays_are_read() {
        let array = |descr: &str, order: &str| {
            let text = format!(
                "{{'descr': '{descr}', 'fortran_order': {order}, 'shape': (400, 256), }}\n"
            );
            let length = u16::try_from(text.len()).unwrap().to_le_bytes();
            [MAGIC, &[1, 0], &length, text.as_bytes()].concat()
        };
        let whole = array("<f4", "False");
        assert_eq!(header(&whole), Some(Ok((Dtype::F32, vec![400, 256], whole.len()))));
        assert!(header(&array("<f8", "False")).unwrap().unwrap_err().contains("<f8"));
        assert!(header(&array("<f4", "True")).unwrap().unwrap_err().contains("Fortran"));
        for cut in 0..whole.len() {
            assert_eq!(header(&whole[..cut]), None, "{cut}");
        }
    }
}
