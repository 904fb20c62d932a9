//! A state as bytes, which another process can go on from.
//!
//! | bytes | what |
//! |---|---|
//! | 8 | [`MAGIC`], the last of which is the version |
//! | 8 | length of the description, little-endian |
//! | that many | [`Description`], as JSON |
//! | the rest | the tensors, one behind the other: of caches the used rows of each block |

use std::borrow::Cow;

use half::f16;
use serde::{Deserialize, Serialize};

use super::PositionTrack;
use super::cache::Rows;
use super::int8::recentred;
use super::wiring::Wiring;
use crate::kernels::{all_finite, f16_to_f32, f32_to_f16};
use qhx_op::{BufferId, DType, Error, ErrorCode, Host, Result};

const MAGIC: [u8; 8] = *b"qhxkit\0\x01";
/// Offset of the description.
const HEAD: usize = 16;

/// Description of an exported state.
#[derive(Debug, Serialize, Deserialize)]
struct Description {
    position: usize,
    written: usize,
    /// See [`PositionTrack::images`].
    #[serde(default)]
    images: Vec<[usize; 3]>,
    /// See [`PositionTrack::videos`].
    #[serde(default)]
    videos: Vec<[usize; 3]>,
    tensors: Vec<Tensor>,
}

/// Form of a cache or a replaced state on which both sides have to agree. Its precision may differ: f16 on one side and
/// f32 on the other.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Tensor {
    role: String,
    dtype: DType,
    /// Blocks and bytes of a row of a cache; of a state, 1 and all of its bytes.
    layout: [usize; 2],
    /// Slots of a ring.
    ring: Option<usize>,
}

impl Tensor {
    /// The same values as `dtype`, where they can be converted.
    fn stored_as(&self, dtype: DType) -> Option<Self> {
        if dtype == self.dtype {
            return Some(self.clone());
        }
        let [blocks, row] = self.layout;
        let row = match (self.dtype, dtype) {
            (DType::F32, DType::F16) => row / 2,
            (DType::F16, DType::F32) => row.checked_mul(2)?,
            _ => return None,
        };
        Some(Self { role: self.role.clone(), dtype, layout: [blocks, row], ring: self.ring })
    }
}

/// Bytes of floats as `to`, where they are of another precision.
fn converted(bytes: &[u8], from: DType, to: DType) -> Cow<'_, [u8]> {
    match (from, to) {
        (DType::F16, DType::F32) => {
            let halves = bytes.as_chunks().0.iter().copied().map(f16::from_ne_bytes);
            let halves: Vec<_> = halves.collect();
            let mut floats = vec![0.0; halves.len()];
            f16_to_f32(&halves, &mut floats);
            Cow::Owned(bytemuck::cast_slice(&floats).to_vec())
        }
        (DType::F32, DType::F16) => {
            let floats = bytes.as_chunks().0.iter().copied().map(f32::from_ne_bytes);
            let floats: Vec<_> = floats.collect();
            let mut halves = vec![f16::ZERO; floats.len()];
            f32_to_f16(&floats, &mut halves);
            Cow::Owned(bytemuck::cast_slice(&halves).to_vec())
        }
        _ => Cow::Borrowed(bytes),
    }
}

/// A tensor of the state, and where it lies.
struct Place {
    tensor: Tensor,
    buffer: BufferId,
    /// Index into [`Wiring::caches`].
    cache: Option<usize>,
    bytes: usize,
}

/// The tensors of a state at `position`, in their order.
fn places(host: &Host, wiring: &Wiring, position: usize) -> Vec<Place> {
    let caches = wiring.caches.iter().enumerate().map(|(index, cache)| Place {
        tensor: Tensor {
            role: cache.role.clone(),
            dtype: match cache.rows {
                Rows::Int8 { .. } => DType::I8,
                Rows::Plain | Rows::Scales => cache.dtype,
            },
            layout: [cache.outer, cache.row],
            ring: cache.window.map(|_| cache.capacity),
        },
        buffer: cache.buffer,
        cache: Some(index),
        bytes: cache.outer * cache.used(position) * cache.row,
    });
    let states = wiring.states.iter().enumerate().map(|(index, state)| {
        let bytes = host.len(state.current);
        let swap = wiring.swaps.iter().find(|swap| swap.state == index);
        let dtype = swap.map_or(DType::U8, |swap| host.graph(swap.graph).inputs[swap.input].dtype);
        let tensor = Tensor { role: state.role.clone(), dtype, layout: [1, bytes], ring: None };
        Place { tensor, buffer: state.current, cache: None, bytes }
    });
    caches.chain(states).collect()
}

/// The state as bytes.
///
/// # Errors
/// When they do not fit the memory.
pub(super) fn export(
    host: &Host,
    wiring: &Wiring,
    position: usize,
    written: usize,
    track: &PositionTrack,
) -> Result<Vec<u8>> {
    let places = places(host, wiring, position);
    let length: usize = places.iter().map(|place| place.bytes).sum();
    let tensors = places.iter().map(|place| &place.tensor);
    let description = serde_json::json!({
        "position": position,
        "written": written,
        "images": track.images().collect::<Vec<_>>(),
        "videos": track.videos().collect::<Vec<_>>(),
        "tensors": tensors.collect::<Vec<_>>(),
    })
    .to_string();
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(HEAD + description.len() + length).map_err(|e| {
        let message = format!("a state of {length} bytes does not fit the memory: {e}");
        Error::new(ErrorCode::INTERNAL, message)
    })?;
    bytes.extend_from_slice(&MAGIC);
    bytes.extend_from_slice(&(description.len() as u64).to_le_bytes());
    bytes.extend_from_slice(description.as_bytes());
    for place in places {
        let source = host.bytes(place.buffer);
        match place.cache {
            Some(cache) => {
                let (cache, start) = (&wiring.caches[cache], bytes.len());
                cache.gather(source, cache.used(position), &mut bytes);
                if let Rows::Int8 { zero, .. } = cache.rows {
                    recentred(&mut bytes[start..], zero);
                }
            }
            None => bytes.extend_from_slice(source),
        }
    }
    Ok(bytes)
}

/// Copies the tensors of a state back. Returns how far caches are written, and the track.
///
/// # Errors
/// When the bytes are no state of such tensors at `position`. Nothing is copied then.
pub(super) fn import(
    host: &mut Host,
    wiring: &mut Wiring,
    position: usize,
    bytes: &[u8],
) -> Result<(usize, PositionTrack)> {
    let (description, mut rest) = split(bytes)?;
    let Description { position: at, written, images, videos, tensors } = description;
    if at != position || written < position {
        return Err(invalid(format_args!(
            "its position is {at} with {written} written, expected {position}"
        )));
    }
    let small = wiring.caches.iter().find(|cache| !cache.has_room(0, position));
    if let Some(cache) = small {
        return Err(invalid(format_args!(
            "its position is {position}, but the cache {} has {} rows",
            cache.name(),
            cache.capacity
        )));
    }
    let track = PositionTrack::of(&images, &videos, position)
        .ok_or_else(|| invalid("its images do not lie behind each other, below its position"))?;
    let places = places(host, wiring, position);
    check_caches(&tensors, &places)?;
    if tensors.len() != places.len() {
        let (found, expected) = (tensors.len(), places.len());
        return Err(invalid(format_args!("it has {found} tensors, expected {expected}")));
    }
    let mut parts = Vec::with_capacity(places.len());
    for (found, place) in tensors.iter().zip(&places) {
        let Place { tensor: expected, bytes, .. } = place;
        if expected.stored_as(found.dtype).as_ref() != Some(found) {
            return Err(invalid(format_args!("found tensor {found:?}, expected {expected:?}")));
        }
        let bytes = match found.dtype == expected.dtype {
            true => *bytes,
            false => bytes / expected.dtype.size() * found.dtype.size(),
        };
        let Some((part, behind)) = rest.split_at_checked(bytes) else {
            return Err(invalid(format_args!(
                "it is cut short: past_{} has {} bytes, expected {bytes}",
                expected.role,
                rest.len()
            )));
        };
        let part = converted(part, found.dtype, expected.dtype);
        if !all_finite(&part, expected.dtype) {
            return Err(invalid(format_args!(
                "past_{} has NaN or infinite values, expected numbers",
                expected.role
            )));
        }
        parts.push(part);
        rest = behind;
    }
    if !rest.is_empty() {
        return Err(invalid(format_args!("{} bytes follow its end", rest.len())));
    }
    wiring.widen();
    for (part, place) in parts.into_iter().zip(&places) {
        let target = host.bytes_mut(place.buffer);
        match place.cache {
            Some(cache) => {
                let (cache, mut part) = (&wiring.caches[cache], part);
                if let Rows::Int8 { zero, .. } = cache.rows
                    && zero != 0
                {
                    recentred(part.to_mut(), zero);
                }
                cache.scatter(&part, cache.used(position), target);
            }
            None => target.copy_from_slice(&part),
        }
    }
    Ok((written, track))
}

/// Errors where caches are int8 on one side alone.
fn check_caches(found: &[Tensor], expected: &[Place]) -> Result<()> {
    let is_int8 = |tensor: &Tensor| tensor.dtype == DType::I8;
    for Place { tensor: expected, .. } in expected {
        let found = found.iter().find(|found| found.role == expected.role);
        let Some(found) = found.filter(|found| is_int8(found) != is_int8(expected)) else {
            continue;
        };
        return Err(invalid(format_args!(
            "its cache past_{} is {}, expected {}; caches of int8 and of floats do not become each other: open it with \
             a bundle that was made with the same --caches",
            found.role,
            found.dtype.name(),
            expected.dtype.name()
        )));
    }
    Ok(())
}

/// The description, and what follows it.
fn split(bytes: &[u8]) -> Result<(Description, &[u8])> {
    let (magic, rest) = bytes.split_at_checked(MAGIC.len()).unwrap_or((&[], &[]));
    if magic != MAGIC {
        return Err(invalid("it does not begin as states of this version do"));
    }
    let (length, rest) = rest
        .split_first_chunk()
        .ok_or_else(|| invalid("it is cut short before its description"))?;
    let length = usize::try_from(u64::from_le_bytes(*length)).unwrap_or(usize::MAX);
    let (description, rest) = rest
        .split_at_checked(length)
        .ok_or_else(|| invalid("it is cut short within its description"))?;
    let description = serde_json::from_slice(description)
        .map_err(|e| invalid(format_args!("its description: {e}")))?;
    Ok((description, rest))
}

fn invalid(why: impl std::fmt::Display) -> Error {
    Error::prompt(format!("the state cannot be imported: {why}"))
}
