//! Packets of Opus, decoded at 48 kHz.

use opus_pure::{MAX_PACKET_SAMPLES, OpusDecoder, packet};

/// The rate that packets are decoded at, which the times of all containers count in.
pub(crate) const RATE: u32 = 48_000;

/// A decoder, and the fields of the header (RFC 7845, section 5.1).
pub(crate) struct Opus {
    decoder: OpusDecoder,
    samples: Vec<f32>,
    pub channels: usize,
    /// Samples at the beginning that only fill the decoder.
    pub pre_skip: u64,
}

impl Opus {
    /// Reads the header. Its numbers have the high byte first in an MP4 file.
    ///
    /// # Errors
    ///
    /// A header that is cut off, of another codec, or of more than two channels.
    pub(crate) fn new(head: &[u8], big_endian: bool) -> Result<Self, String> {
        let [b'O', b'p', b'u', b's', b'H', b'e', b'a', b'd', _, channels, skip @ ..] = head else {
            return Err("it has no header of Opus".to_owned());
        };
        let [s0, s1, _, _, _, _, g0, g1, ..] = *skip else {
            return Err("its header of Opus is cut off".to_owned());
        };
        let channels = usize::from(*channels);
        if !(1..=2).contains(&channels) {
            return Err(format!("Opus of {channels} channels, expected 1 or 2"));
        }
        let two =
            |pair| if big_endian { u16::from_be_bytes(pair) } else { u16::from_le_bytes(pair) };
        let mut decoder =
            OpusDecoder::new(RATE.cast_signed(), channels).map_err(|e| e.to_string())?;
        decoder.gain_q8 = two([g0, g1]).cast_signed().into();
        let samples = vec![0.0; MAX_PACKET_SAMPLES * channels];
        Ok(Self { decoder, samples, channels, pre_skip: two([s0, s1]).into() })
    }

    /// Decodes a packet: its samples, the channels one behind the other.
    ///
    /// # Errors
    ///
    /// A packet that is damaged.
    pub(crate) fn decode(&mut self, data: &[u8]) -> Result<&[f32], String> {
        let samples = packet::samples(data, RATE.cast_signed()).map_err(|e| e.to_string())?;
        let decoded = self.decoder.decode(data, samples, &mut self.samples);
        let decoded = decoded.map_err(|e| e.to_string())?;
        Ok(self.samples.get(..decoded * self.channels).unwrap_or_default())
    }
}
