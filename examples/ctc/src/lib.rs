//! `ctc_transcribe`: a recogniser whose steps are frames and not tokens (Graves et al. 2006). One graph takes the
//! log-mel frames of a clip and gives scores of letters for each group of frames; the likeliest of each, without
//! repetitions and blanks, are the answer. It keeps nothing from clip to clip, so it has neither a decoder nor a state.

use qhx_kit::audio::{Clip, FrontEnd, LogMel};
use qhx_kit::fill::FloatInput;
use qhx_kit::schema;
use qhx_op::{
    Answer, Error, GraphId, Host, MediaRules, Modality, Op, OpDescription, OpenInfo, Recognizer,
    Result, Segment, Task, View,
};
use serde::Deserialize;
use serde_json::json;

/// `params.audio` of the manifest.
#[derive(Debug, Deserialize)]
struct Params {
    front_end: FrontEnd,
    /// The token that stands for no letter.
    blank: u32,
}

/// The open op.
#[derive(Debug)]
pub struct Ctc {
    params: Params,
    log_mel: LogMel,
    graph: GraphId,
    mel: FloatInput,
    scores: View,
    /// Frames that the graph takes, groups that it makes of them, and scores of each.
    sizes: [usize; 3],
}

impl Op for Ctc {
    fn describe() -> OpDescription {
        OpDescription {
            name: "ctc_transcribe".to_owned(),
            summary: "Speech to text by connectionist temporal classification".to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            tasks: vec![Task::Transcribe],
            modalities: vec![Modality::Audio],
            params_schema: json!({
                "type": "object",
                "required": ["recognise"],
                "properties": {
                    "recognise": schema::graphs("Graph from log-mel frames to scores."),
                    "tensors": schema::tensors(["mel", "scores"])
                }
            }),
        }
    }

    fn open(host: &mut Host) -> Result<Self> {
        let name: String = host.require("/plan/params/recognise")?;
        let graph = host.require_graph("/plan/params/recognise", &name)?;
        let params: Params = host.require("/params/audio")?;
        let log_mel = LogMel::new(params.front_end.clone())?;
        let (frames, mels) = host.rows_of(graph, host.input(graph, "mel")?)?;
        let port = host.output(graph, "scores")?;
        let (groups, letters) = host.rows_of(graph, port)?;
        if mels != log_mel.mels() || groups == 0 || params.blank as usize >= letters {
            return Err(Error::graph(format!(
                "graph {name:?}: frames of {mels} mels and scores of {letters} letters, expected {} mels as \
                 params.audio.front_end makes them, and more letters than the blank, {}",
                log_mel.mels(),
                params.blank
            )));
        }
        let mel = FloatInput::require(host, graph, "mel")?;
        let scores = host.view_for(graph, port)?;
        Ok(Self { params, log_mel, graph, mel, scores, sizes: [frames, groups, letters] })
    }

    fn info(&self) -> OpenInfo {
        let mut media = MediaRules::default();
        media.audio.rate = self.params.front_end.rate;
        OpenInfo { media, ..OpenInfo::default() }
    }

    fn recognizer(&mut self) -> Option<&mut dyn Recognizer> {
        Some(self)
    }
}

impl Recognizer for Ctc {
    fn answer(&mut self, host: &mut Host, segments: &[Segment<'_>]) -> Result<Answer> {
        let [segment] = segments else {
            return Err(Error::prompt(format!("{} segments, expected one clip", segments.len())));
        };
        let FrontEnd { rate, hop, .. } = self.params.front_end;
        let clip = Clip::of_segment(segment, rate)?;
        let [frames, groups, letters] = self.sizes;
        let mut rows = vec![0.0; frames * self.log_mel.mels()];
        // A longer clip is refused here, with its length; the rows behind a shorter one are 0.
        let heard = self.log_mel.write(clip, &mut rows)?;
        self.mel.write(host, &rows)?;
        host.execute(self.graph)?;
        let mut scores = vec![0.0; groups * letters];
        self.scores.to_f32(host, 0, &mut scores)?;
        let seconds = |group: usize| (group * frames / groups * hop) as f32 / rate as f32;
        let (mut answer, mut last) = (Answer::default(), self.params.blank);
        let heard = (heard * groups).div_ceil(frames);
        for (group, row) in scores.chunks_exact(letters).take(heard).enumerate() {
            let best = row.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
            let token = best.map_or(self.params.blank, |(token, _)| token as u32);
            if token != self.params.blank {
                if token != last {
                    answer.tokens.push(token);
                    answer.times.push([seconds(group), seconds(group + 1)]);
                } else if let Some([_, end]) = answer.times.last_mut() {
                    *end = seconds(group + 1);
                }
            }
            last = token;
        }
        Ok(answer)
    }
}

qhx_op::register_ops!(Ctc);
qhx_op::export_plugin!();
