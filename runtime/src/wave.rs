//! Samples as the bytes of a file, which are then read, checked and resampled as any other.

/// A WAV file of one channel of f32.
pub(crate) fn file(samples: &[f32], rate: u32) -> Vec<u8> {
    const HEADER: u32 = 44;
    let len = u32::try_from(size_of_val(samples)).unwrap_or(u32::MAX - HEADER);
    let mut bytes = Vec::with_capacity(HEADER as usize + samples.len() * 4);
    let mut put = |part: &[u8]| bytes.extend_from_slice(part);
    put(b"RIFF");
    put(&(HEADER - 8 + len).to_le_bytes());
    put(b"WAVEfmt ");
    put(&16_u32.to_le_bytes());
    // IEEE float, one channel.
    put(&3_u16.to_le_bytes());
    put(&1_u16.to_le_bytes());
    put(&rate.to_le_bytes());
    put(&rate.saturating_mul(4).to_le_bytes());
    put(&4_u16.to_le_bytes());
    put(&32_u16.to_le_bytes());
    put(b"data");
    put(&len.to_le_bytes());
    samples.iter().for_each(|sample| put(&sample.to_le_bytes()));
    bytes
}
