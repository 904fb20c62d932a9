//! Transcripts as the subtitles that players read: a cue a segment, or a word where words have times.

use super::{Chunk, Transcript};

/// `SubRip`: numbered cues.
pub fn srt(transcript: &Transcript) -> String {
    let cue = |(number, chunk): (usize, &Chunk)| {
        let (start, end) = (clock(chunk.start, ','), clock(chunk.end, ','));
        format!("{}\n{start} --> {end}\n{}\n\n", number + 1, chunk.text)
    };
    cues(transcript).iter().enumerate().map(cue).collect()
}

/// `WebVTT`.
pub fn vtt(transcript: &Transcript) -> String {
    let cue = |chunk: &Chunk| {
        let (start, end) = (clock(chunk.start, '.'), clock(chunk.end, '.'));
        format!("{start} --> {end}\n{}\n\n", chunk.text)
    };
    let cues: String = cues(transcript).iter().map(cue).collect();
    format!("WEBVTT\n\n{cues}")
}

fn cues(transcript: &Transcript) -> &[Chunk] {
    if transcript.words.is_empty() { &transcript.chunks } else { &transcript.words }
}

/// Hours, minutes, seconds, and thousandths behind `point`.
fn clock(seconds: f64, point: char) -> String {
    let all = (seconds.max(0.0) * 1e3).round() as u64;
    let (hours, minutes) = (all / 3_600_000, all / 60_000 % 60);
    format!("{hours:02}:{minutes:02}:{:02}{point}{:03}", all / 1000 % 60, all % 1000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_written_as_players_read_them() {
        assert_eq!(clock(3723.0456, ','), "01:02:03,046");
        assert_eq!(clock(0.0, '.'), "00:00:00.000");
        assert_eq!(clock(-1.0, '.'), "00:00:00.000");
    }
}
