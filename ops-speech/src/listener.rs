//! A clip that a decoder attends to: what an encoder's graphs make of it, once, and the decoder's graphs read where it
//! lies. The clip stands at one position, that of the token that begins an answer.

use std::time::Instant;

use qhx_kit::audio::Clip;
use qhx_kit::decoder::{Chunk, Decoder, Filler, GraphVariant};
use qhx_kit::fill::{Embedding, FloatInput};
use qhx_op::text::not_taken;
use qhx_op::{
    BufferId, Error, GraphId, Host, Piece, Placement, Port, Result, Segment, SpanId, View,
};

const POSITIONS: &str = "/artifacts/positions/table";

/// Samples to the inputs of an encoder's graph.
pub(crate) trait Ear: std::fmt::Debug + Send {
    /// The graphs of the encoder, which have the same outputs.
    fn graphs(&self) -> Vec<GraphId>;

    /// Samples of a second.
    fn rate(&self) -> u32;

    /// The most samples that it takes at once.
    fn most(&self) -> usize;

    /// Writes the inputs for a clip of at most as many, and names the graph to be run.
    fn write(&mut self, host: &mut Host, clip: Clip<'_>) -> Result<GraphId>;
}

/// An encoder, and what the decoder reads of it.
#[derive(Debug)]
pub(crate) struct Listener<E> {
    pub(crate) ear: E,
    /// Token at whose position a clip stands.
    pub(crate) token: u32,
    /// `cross_k_0` and so on, with the buffer that holds it and the length of that.
    outputs: Vec<(String, BufferId, View)>,
    /// Samples of the clip that was encoded since the last reset.
    pub(crate) heard: Option<usize>,
    span: SpanId,
}

impl<E: Ear> Listener<E> {
    /// Binds the outputs of the encoder's graphs; all write the same buffers.
    pub(crate) fn open(host: &mut Host, ear: E) -> Result<Self> {
        let token = host.require("/params/audio/token_id")?;
        let mut outputs: Vec<(String, BufferId, View)> = Vec::new();
        for (index, graph) in ear.graphs().into_iter().enumerate() {
            let names: Vec<String> =
                host.graph(graph).outputs.iter().map(|tensor| tensor.role.clone()).collect();
            for name in names.into_iter().filter(|name| name.starts_with("cross_")) {
                let port = host.output(graph, &name)?;
                if index == 0 {
                    let view = host.view_for(graph, port)?;
                    outputs.push((name, view.buffer, view));
                    continue;
                }
                let buffer = fitting(host, &outputs, graph, port, &name)?;
                host.bind(graph, port, buffer, 0)?;
            }
        }
        Ok(Self { ear, token, outputs, heard: None, span: host.span("encoder") })
    }

    /// Errors unless the token of a clip is one of the decoder's.
    pub(crate) fn check_token(&self, decoder: &Decoder) -> Result<()> {
        if (self.token as usize) < decoder.input_vocab() {
            return Ok(());
        }
        Err(Error::manifest(format!(
            "manifest /params/audio/token_id: found {}, expected a token below {}, the rows of the embedding table",
            self.token,
            decoder.input_vocab()
        )))
    }

    /// What has the decoder's graphs read the encoder's outputs.
    pub(crate) fn cross(&self) -> Cross {
        Cross { outputs: self.outputs.clone() }
    }

    /// The clip of a segment that the encoder takes.
    fn clip<'a>(&self, segment: &Segment<'a>) -> Result<Clip<'a>> {
        let clip = Clip::of_segment(segment, self.ear.rate())?;
        let (found, max) = (clip.samples().len(), self.ear.most());
        if found > max {
            let seconds = |samples: usize| samples as f64 / f64::from(self.ear.rate().max(1));
            return Err(Error::prompt(format!(
                "audio of {:.2} s, the encoder takes {:.2} s at once; take less of it, or have `qhx transcribe` cut it \
                 into windows",
                seconds(found),
                seconds(max)
            )));
        }
        Ok(clip)
    }

    pub(crate) fn place(&self, segment: &Segment<'_>) -> Result<Placement> {
        self.clip(segment)?;
        let token = self.token;
        let pieces = vec![Piece::Part { token, positions: 1, frames: None, part: None }];
        Ok(Placement { marker: token, pieces, ..Placement::default() })
    }

    pub(crate) fn reset(&mut self, host: &mut Host, decoder: &mut Decoder) -> Result<()> {
        self.heard = None;
        qhx_op::Generator::reset(decoder, host)
    }

    /// Encodes the clip of a prompt, and has the decoder consume it.
    pub(crate) fn prefill(
        &mut self,
        host: &mut Host,
        decoder: &mut Decoder,
        segments: &[Segment<'_>],
    ) -> Result<View> {
        let mut tokens = Vec::new();
        let mut heard = None;
        for segment in segments {
            match segment {
                Segment::Tokens(ids) => tokens.extend_from_slice(ids),
                Segment::Audio { .. } if heard.is_none() => {
                    heard = Some(self.clip(segment)?);
                    tokens.push(self.token);
                }
                Segment::Audio { .. } => {
                    return Err(Error::prompt("the prompt has two audio clips, expected one"));
                }
                other => return Err(not_taken(host.op(), other)),
            }
        }
        match heard {
            // Of what is consumed already, every row has attended to another clip.
            Some(_) if decoder.state().position() > 0 => {
                return Err(Error::prompt(
                    "audio begins a transcription: the state holds another one; reset it first",
                ));
            }
            Some(clip) => self.run(host, clip)?,
            None if self.heard.is_none() => {
                return Err(Error::prompt("the prompt has no audio, expected one clip"));
            }
            None => {}
        }
        qhx_op::Generator::prefill(decoder, host, &[Segment::Tokens(&tokens)])
    }

    fn run(&mut self, host: &mut Host, clip: Clip<'_>) -> Result<()> {
        let start = Instant::now();
        self.heard = None;
        let graph = self.ear.write(host, clip)?;
        host.execute(graph)?;
        for (name, _, view) in &self.outputs {
            host.dump(name, *view, &[view.len])?;
        }
        self.heard = Some(clip.samples().len());
        host.end(self.span, start);
        Ok(())
    }
}

/// The buffer of the encoder's output `role`, where a tensor has its length and type.
fn fitting(
    host: &Host,
    outputs: &[(String, BufferId, View)],
    graph: GraphId,
    port: Port,
    role: &str,
) -> Result<BufferId> {
    let tensor = host.tensor(graph, port);
    let found = outputs.iter().find(|(name, ..)| name == role);
    let fits = |view: &View| view.len == tensor.elements() && view.dtype == tensor.dtype;
    match found.filter(|(.., view)| fits(view)) {
        Some((_, buffer, _)) => Ok(*buffer),
        None => {
            let what = format!("the encoder has no output {role:?} of that length and type");
            Err(host.misfit(graph, port, what))
        }
    }
}

/// The refusal of what would be saved without the clip that it attends to.
pub(crate) fn attends() -> Error {
    Error::unsupported("exporting its state, which attends to a clip")
}

/// Binds the inputs `cross_*` of the decoder to what the encoder writes.
#[derive(Debug)]
pub(crate) struct Cross {
    outputs: Vec<(String, BufferId, View)>,
}

impl Filler for Cross {
    fn bind(&mut self, host: &mut Host, pass: GraphVariant<'_>) -> Result<()> {
        for &graph in pass.graphs {
            let wanted: Vec<(usize, String)> = host
                .graph(graph)
                .inputs
                .iter()
                .enumerate()
                .filter(|(_, tensor)| tensor.role.starts_with("cross_"))
                .map(|(index, tensor)| (index, tensor.role.clone()))
                .collect();
            for (index, role) in wanted {
                let port = Port::Input(index);
                let buffer = fitting(host, &self.outputs, graph, port, &role)?;
                host.bind(graph, port, buffer, 0)?;
            }
        }
        Ok(())
    }

    fn fill(&mut self, _: &mut Host, _: Chunk<'_>) -> Result<()> {
        Ok(())
    }
}

/// Learned positions: rows of a table for the input `pos` of the first shard.
#[derive(Debug)]
pub(crate) struct Positions {
    table: Embedding,
    inputs: Vec<FloatInput>,
    /// Positions of the step.
    places: Vec<u32>,
}

impl Positions {
    pub(crate) fn open(host: &mut Host, hidden: usize) -> Result<Self> {
        let table = Embedding::open_at(host, POSITIONS, hidden, None)?;
        Ok(Self { table, inputs: Vec::new(), places: Vec::new() })
    }
}

impl Filler for Positions {
    fn bind(&mut self, host: &mut Host, pass: GraphVariant<'_>) -> Result<()> {
        self.inputs.push(self.table.bind(host, pass.graphs[0], "pos", pass.rows)?);
        self.places.reserve(pass.rows);
        Ok(())
    }

    fn fill(&mut self, host: &mut Host, chunk: Chunk<'_>) -> Result<()> {
        self.places.clear();
        self.places.extend((chunk.position..).take(chunk.tokens.len()).map(|at| at as u32));
        self.table.fill(host, &self.places, &self.inputs[chunk.pass])
    }
}
