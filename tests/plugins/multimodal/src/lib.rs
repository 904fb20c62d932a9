//! A host-op that takes text, images, audio and videos, and sums what it is fed.
//!
//! A position is a row of 16 numbers, one for each token. A token's row has a 1 at the token. An image takes one
//! position for each of its rows of pixels, with what they have of red, green and blue at [`COLOURS`]. An audio clip
//! takes one for every 100 samples, with their mean magnitude at [`LOUD`]. A video takes one for each frame, after the
//! token [`FRAME`], with how bright the frame is at [`BRIGHT`]. The graph `step` adds the row to a state; the sum are
//! the logits.

use qhx_kit::state::StateCarrier;
use qhx_op::{
    BufferId, DType, Encoder, Error, Generator, GraphId, Host, Modality, Op, OpDescription,
    OpenInfo, Piece, Placement, Port, Result, Segment, SpanId, Task, View,
};

/// Elements of a row, and tokens.
const WIDTH: usize = 16;
/// Tokens that stand for an image, an audio clip and a video.
pub const IMAGE: u32 = 4;
/// See [`IMAGE`].
pub const AUDIO: u32 = 5;
/// See [`IMAGE`].
pub const VIDEO: u32 = 6;
/// Token before and after an image where no template writes it.
pub const EDGE: u32 = 7;
/// Token before each frame of a video.
pub const FRAME: u32 = 13;
/// Position of red, green and blue in a row.
pub const COLOURS: usize = 8;
/// Position of the loudness in a row.
pub const LOUD: usize = 11;
/// Position of the brightness in a row.
pub const BRIGHT: usize = 12;
/// Samples of one position.
pub const SAMPLES: usize = 100;

struct Multimodal {
    graph: GraphId,
    x: BufferId,
    state: StateCarrier,
    logits: View,
    /// Mean loudness of the last audio clip, from 0 to 1.
    loudness: Option<f32>,
    /// `params.panics_in_reset`: where something was consumed, [`Generator::reset`] panics.
    panics_in_reset: bool,
    seeing: SpanId,
    hearing: SpanId,
}

impl Multimodal {
    /// Consumes one position.
    fn step(&mut self, host: &mut Host, row: [f32; WIDTH]) -> Result<()> {
        host.f32s_mut(self.x).copy_from_slice(&row);
        host.execute(self.graph)?;
        self.state.commit(host, 0, 1)
    }

    fn see(&mut self, host: &mut Host, segment: &Segment<'_>) -> Result<()> {
        let start = std::time::Instant::now();
        let rows = rows(segment)?;
        if host.dumping() {
            host.dump_values("rows", &rows.concat(), &[rows.len(), WIDTH])?;
        }
        for row in rows {
            self.step(host, row)?;
        }
        let audio = matches!(segment, Segment::Audio { .. });
        if let Segment::Audio { samples, .. } = segment {
            self.loudness = Some(mean(samples.iter().map(|sample| sample.abs())));
        }
        host.end(if audio { self.hearing } else { self.seeing }, start);
        Ok(())
    }
}

fn mean(values: impl ExactSizeIterator<Item = f32>) -> f32 {
    let count = values.len().max(1) as f32;
    values.sum::<f32>() / count
}

/// The rows of an image, audio or video.
fn rows(segment: &Segment<'_>) -> Result<Vec<[f32; WIDTH]>> {
    let row = |values: &[(usize, f32)]| {
        let mut row = [0.0; WIDTH];
        values.iter().for_each(|&(at, value)| row[at] = value);
        row
    };
    match *segment {
        Segment::Image { rgb, width, .. } => {
            let pixels = rgb.chunks_exact(3 * (width as usize).max(1));
            let colour = |pixels: &[u8], channel: usize| {
                mean(pixels.chunks_exact(3).map(|p| f32::from(p[channel]) / 255.0))
            };
            let colours = |pixels: &[u8]| [0, 1, 2].map(|c| (COLOURS + c, colour(pixels, c)));
            Ok(pixels.map(|pixels| row(&colours(pixels))).collect())
        }
        Segment::Audio { samples, .. } => {
            let loud = |piece: &[f32]| mean(piece.iter().map(|s| s.abs()));
            Ok(samples.chunks(SAMPLES).map(|piece| row(&[(LOUD, 9.0 * loud(piece))])).collect())
        }
        Segment::Video { rgb, times, .. } => {
            let frames = rgb.chunks_exact((rgb.len() / times.len().max(1)).max(1));
            let bright = |frame: &[u8]| mean(frame.iter().map(|&v| f32::from(v) / 255.0));
            Ok(frames.map(|frame| row(&[(BRIGHT, 3.0 * bright(frame))])).collect())
        }
        _ => Err(Error::prompt("a segment of an unknown kind")),
    }
}

impl Op for Multimodal {
    fn describe() -> OpDescription {
        OpDescription {
            name: "test_multimodal".to_owned(),
            summary: "sums what it is fed".to_owned(),
            version: "0.0.1".to_owned(),
            tasks: vec![Task::Generate, Task::Embed],
            modalities: vec![Modality::Text, Modality::Image, Modality::Audio, Modality::Video],
            params_schema: serde_json::json!({}),
        }
    }

    fn open(host: &mut Host) -> Result<Self> {
        let graph = host.require_graph("/plan/params/step", "step")?;
        let state = StateCarrier::new(host, &[&[graph]])?;
        let input = Port::Input(host.graph(graph).require_input("x")?);
        let output = Port::Output(host.graph(graph).require_output("logits")?);
        let x = host.allocate_for(graph, input)?;
        let buffer = host.allocate_for(graph, output)?;
        let logits = View { buffer, dtype: DType::F32, offset: 0, len: WIDTH };
        let (seeing, hearing) = (host.span("vision"), host.span("audio"));
        let panics_in_reset = host.value("/params/panics_in_reset")?.unwrap_or(false);
        Ok(Self { graph, x, state, logits, loudness: None, panics_in_reset, seeing, hearing })
    }

    fn info(&self) -> OpenInfo {
        let mut info = OpenInfo {
            vocab: WIDTH,
            max_ctx: 64,
            embedding_dim: WIDTH,
            placeholders: vec![IMAGE, AUDIO, VIDEO],
            ..OpenInfo::default()
        };
        info.media.audio.rate = 8000;
        self.state.describe(&mut info);
        info
    }

    fn generator(&mut self) -> Option<&mut dyn Generator> {
        Some(self)
    }

    fn encoder(&mut self) -> Option<&mut dyn Encoder> {
        Some(self)
    }
}

impl Generator for Multimodal {
    fn reset(&mut self, host: &mut Host) -> Result<()> {
        assert!(!self.panics_in_reset || self.state.position() == 0, "reset goes wrong");
        self.state.reset(host);
        Ok(())
    }

    qhx_op::inner_generator!(state);

    fn place(&self, segment: &Segment<'_>) -> Result<Placement> {
        let part = |token, positions| Piece::Part { token, positions, frames: None, part: None };
        Ok(match *segment {
            Segment::Image { height, .. } => Placement {
                marker: IMAGE,
                opening: vec![EDGE],
                closing: vec![EDGE],
                pieces: vec![part(IMAGE, height as usize)],
            },
            Segment::Audio { samples, .. } => Placement {
                marker: AUDIO,
                pieces: vec![part(AUDIO, samples.len().div_ceil(SAMPLES))],
                ..Placement::default()
            },
            Segment::Video { times, .. } => {
                let frame = |at: usize| {
                    [
                        Piece::Tokens(vec![FRAME]),
                        Piece::Part {
                            token: VIDEO,
                            positions: 1,
                            frames: Some((at, at + 1)),
                            part: None,
                        },
                    ]
                };
                let pieces = (0..times.len()).flat_map(frame).collect();
                Placement { marker: VIDEO, pieces, ..Placement::default() }
            }
            _ => return Err(Error::prompt("a segment of an unknown kind")),
        })
    }

    fn note(&self) -> serde_json::Value {
        let found = |loudness| serde_json::json!({"language": "hum", "confidence": loudness});
        self.loudness.map_or(serde_json::Value::Null, found)
    }

    fn prefill(&mut self, host: &mut Host, segments: &[Segment<'_>]) -> Result<View> {
        for segment in segments {
            match segment {
                Segment::Tokens(tokens) => {
                    for &token in *tokens {
                        self.decode(host, token)?;
                    }
                }
                segment => self.see(host, segment)?,
            }
        }
        Ok(self.logits)
    }

    fn decode(&mut self, host: &mut Host, token: u32) -> Result<View> {
        let mut row = [0.0; WIDTH];
        let wrong = || Error::prompt(format!("token {token} is outside the vocabulary of {WIDTH}"));
        *row.get_mut(token as usize).ok_or_else(wrong)? = 1.0;
        self.step(host, row)?;
        Ok(self.logits)
    }
}

impl Encoder for Multimodal {
    fn embed(&mut self, host: &mut Host, segments: &[Segment<'_>]) -> Result<View> {
        self.state.reset(host);
        self.prefill(host, segments)
    }
}

qhx_op::register_ops!(Multimodal);
qhx_op::export_plugin!();

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test that fails does so by panicking")]

    use qhx_op::harness::{OpHarness, OpenOp, graph, tensor};

    use super::*;

    fn open() -> OpenOp {
        let float = |name| tensor(name, DType::F32, [1, WIDTH]);
        OpHarness::new()
            .graph(graph(
                "step",
                [float("x"), float("past_sum")],
                [float("logits"), float("present_sum")],
            ))
            .script(|step| {
                let pairs = step.input("x")?.into_iter().zip(step.input("past_sum")?);
                let sum: Vec<f32> = pairs.map(|(x, past)| x + past).collect();
                step.set("logits", &sum)?;
                step.set("present_sum", &sum)
            })
            .open::<Multimodal>()
            .unwrap()
    }

    #[test]
    fn the_harness_carries_every_kind_of_segment() {
        let mut op = open();
        assert_eq!(op.info().placeholders, [IMAGE, AUDIO, VIDEO]);
        assert_eq!(op.info().media.audio.rate, 8000);
        let image = Segment::Image {
            rgb: &[255, 0, 0, 255, 0, 0, 0, 51, 0, 0, 51, 0],
            width: 2,
            height: 2,
        };
        let placement = op.place(image).unwrap();
        let part = Piece::Part { token: IMAGE, positions: 2, frames: None, part: None };
        assert_eq!((placement.marker, placement.pieces), (IMAGE, vec![part]));
        let logits = op.prefill(&[Segment::Tokens(&[1]), image]).unwrap();
        assert_eq!((op.position(), logits[1]), (3, 1.0));
        assert_eq!(logits[COLOURS..COLOURS + 3], [1.0, 0.2, 0.0]);

        let saved = op.snapshot().unwrap();
        let audio = Segment::Audio { samples: &[-0.5; 150], rate: 8000 };
        let logits = op.prefill(&[audio]).unwrap();
        assert_eq!((op.position(), logits[LOUD]), (5, 9.0));
        let video =
            Segment::Video { rgb: &[255; 12], width: 1, height: 2, times: &[0.0, 0.5], frames: 2 };
        assert_eq!(op.place(video).unwrap().pieces.len(), 4);
        let logits = op.prefill(&[video]).unwrap();
        assert_eq!((op.position(), logits[BRIGHT]), (7, 6.0));
        op.restore(saved).unwrap();
        let logits = op.decode(0).unwrap();
        assert_eq!((op.position(), logits[LOUD], logits[COLOURS]), (4, 0.0, 1.0));

        let error = op.place(Segment::Unknown(9)).unwrap_err();
        assert!(error.message().contains("unknown kind"), "{error}");
    }
}
