//! Samples as 16-bit PCM, and the header of a WAV file of them.

/// Bytes of [`wav_header`].
pub const WAV_HEADER: usize = 44;

/// The header of a WAV file of one channel of 16 bits, of `samples` samples; of a stream whose length is not known, as
/// long as a file can be.
pub fn wav_header(rate: u32, samples: Option<usize>) -> [u8; WAV_HEADER] {
    let most = u32::MAX - WAV_HEADER as u32;
    let bytes = samples.and_then(|count| u32::try_from(count.checked_mul(2)?).ok());
    let bytes = bytes.unwrap_or(most).min(most);
    let mut header = [0; WAV_HEADER];
    let parts: [&[u8]; 11] = [
        b"RIFF",
        &(bytes + WAV_HEADER as u32 - 8).to_le_bytes(),
        b"WAVEfmt \x10\0\0\0",
        // Integers, of one channel.
        &[1, 0, 1, 0],
        &rate.to_le_bytes(),
        &rate.saturating_mul(2).to_le_bytes(),
        &[2, 0],
        &[16, 0],
        b"data",
        &bytes.to_le_bytes(),
        &[],
    ];
    let values = parts.into_iter().flatten();
    header.iter_mut().zip(values).for_each(|(byte, value)| *byte = *value);
    header
}

/// Samples from −1 to 1 as little-endian integers of 16 bits; what is beyond is cut off.
pub fn pcm16(samples: &[f32]) -> Vec<u8> {
    let value = |sample: &f32| (sample.clamp(-1.0, 1.0) * 32767.0).round() as i16;
    samples.iter().flat_map(|sample| value(sample).to_le_bytes()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_one_that_is_read_again() {
        let samples = [0.0, 0.5, -1.0, 2.0];
        let mut bytes = wav_header(24_000, Some(samples.len())).to_vec();
        bytes.extend(pcm16(&samples));
        let source = qhx_media::Source::Bytes { name: "made".to_owned(), bytes };
        let mut rules = qhx_core::op::AudioRules::default();
        rules.rate = 24_000;
        let read = qhx_media::decode_audio(&source, &rules, &qhx_media::Limits::default()).unwrap();
        let media = read.into_media().unwrap();
        let qhx_core::op::Segment::Audio { samples: found, rate } = media.segment() else {
            panic!("no audio")
        };
        assert_eq!((rate, found.len()), (24_000, 4));
        for (found, expected) in found.iter().zip([0.0, 0.5, -1.0, 1.0]) {
            assert!((found - expected).abs() < 1e-4, "{found} {expected}");
        }
    }
}
