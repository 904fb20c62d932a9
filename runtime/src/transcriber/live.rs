//! Samples that are read as they are recorded.

use std::fmt;
use std::io::Read;

use qhx_base::{Error, ErrorKind, Result};
use qhx_media::Audio;

/// Samples that are read at a time: a tenth of a second.
const BLOCK: usize = 1600;

/// Audio of one channel that is still being recorded, or that is there already.
pub struct Live {
    pub(super) samples: Vec<f32>,
    pub(super) rate: u32,
    /// Signed 16 bits, the low byte first; none once it has ended.
    source: Option<Box<dyn Read + Send>>,
}

impl fmt::Debug for Live {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Live")
            .field("samples", &self.samples.len())
            .field("rate", &self.rate)
            .finish()
    }
}

impl Live {
    /// Samples as `arecord -t raw -f S16_LE -r RATE` writes them.
    pub fn raw(source: impl Read + Send + 'static, rate: u32) -> Self {
        Self { samples: Vec::new(), rate, source: Some(Box::new(source)) }
    }

    pub(super) fn whole(audio: Audio) -> Self {
        Self { samples: audio.samples, rate: audio.rate, source: None }
    }

    /// Reads a tenth of a second. False where the recording has ended.
    pub(super) fn read(&mut self) -> Result<bool> {
        let Some(source) = &mut self.source else { return Ok(false) };
        let mut block = [0u8; 2 * BLOCK];
        let mut filled = 0;
        while filled < block.len() {
            match source.read(block.get_mut(filled..).unwrap_or_default()) {
                Ok(0) => break,
                Ok(count) => filled += count,
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(e) => {
                    return Err(Error::caused(ErrorKind::Io, "the recording cannot be read", e));
                }
            }
        }
        if filled < block.len() {
            self.source = None;
        }
        let whole = block.get(..filled).unwrap_or_default().chunks_exact(2);
        let samples = whole.map(|pair| match *pair {
            [low, high] => f32::from(i16::from_le_bytes([low, high])) / 32768.0,
            _ => 0.0,
        });
        self.samples.extend(samples);
        Ok(filled > 0)
    }
}
