//! The vision graphs: the smallest that an image fits into takes it.

use super::settings::Settings;
use crate::OneOrMany;
use crate::fill::{FloatInput, MASK_VALUE};
use crate::vision::{AxialOrder, Grid, axial_rope, window_numbers};
use qhx_op::{Error, ErrorCode, GraphId, Host, Port, Result, View};

const VISION: &str = "/plan/params/vision";
/// Names of the rows for the prompt; the first is the forge's.
const EMBEDS: [&str; 3] = ["embeds", "image_embeds", "y"];
/// One output for all layers, `[layers, rows, width]`; those of one layer are `deepstack_k`.
const DEEPSTACK: &str = "deepstack";

/// Features of an image, in rows as wide as the decoder's.
#[derive(Debug)]
pub struct Features {
    /// Rows that stand in the prompt, `[tokens, width]`.
    pub embeds: Vec<f32>,
    /// Rows for each of the decoder's first layers, `[tokens, width]`.
    pub deepstack: Vec<Vec<f32>>,
}

/// The vision graphs of a bundle, the smallest first.
#[derive(Debug)]
pub(super) struct Tower {
    graphs: Vec<Bucket>,
    /// Values of a row of `x`.
    hidden: usize,
    /// Values of a row for the decoder.
    width: usize,
    merge: usize,
    /// Patches of a window's side, where graphs have windows.
    window: Option<usize>,
    theta: f64,
    order: AxialOrder,
    /// Rows of the largest graph, for `x` and for one of the rotary tables.
    rows: Vec<f32>,
    tables: [Vec<f32>; 2],
}

/// A vision graph.
#[derive(Debug)]
struct Bucket {
    graph: GraphId,
    patches: usize,
    x: FloatInput,
    /// Cosines and sines, where they are no constants.
    rope: Option<[FloatInput; 2]>,
    /// Hides rows after the last patch; a graph without it takes one grid.
    mask: Option<FloatInput>,
    /// The number of each patch's window, where blocks attend within windows.
    windows: Option<FloatInput>,
    embeds: View,
    /// By layer.
    deepstack: Vec<View>,
}

impl Tower {
    /// Opens the graphs that `plan.params.vision` names and whose contexts are there. None for a bundle without: texts
    /// do not need them.
    ///
    /// # Errors
    /// When graphs, tables or sizes do not fit each other, or a name is no graph's.
    pub fn open(host: &mut Host, settings: &Settings, width: usize) -> Result<Option<Self>> {
        let Some(names) = host.value::<OneOrMany>(VISION)? else { return Ok(None) };
        let found = names.present(host, VISION)?;
        let mut graphs = Vec::new();
        let mut hidden = None;
        for graph in found {
            let input = host.input(graph, "x")?;
            let (patches, values) = host.rows_of(graph, input)?;
            if hidden.is_some_and(|hidden| hidden != values)
                || !patches.is_multiple_of(settings.unit())
            {
                let what = format!(
                    "expected rows as wide as in the other vision graphs, and a multiple of {} \
                     of them",
                    settings.unit()
                );
                return Err(host.misfit(graph, input, what));
            }
            hidden = Some(values);
            graphs.push(Bucket::open(host, graph, patches, patches / settings.unit(), width)?);
        }
        let Some(hidden) = hidden else { return Ok(None) };
        graphs.sort_by_key(|bucket| bucket.patches);
        let layers = graphs[0].deepstack.len();
        if let Some(other) = graphs.iter().find(|bucket| bucket.deepstack.len() != layers) {
            return Err(Error::graph(format!(
                "graph {:?} gives deepstack rows for {} layers, expected {layers} as the other vision graphs",
                host.graph(other.graph).name,
                other.deepstack.len()
            )));
        }
        let fixed = graphs.iter().any(|bucket| bucket.mask.is_none());
        let side = graphs[0].patches.isqrt();
        if fixed
            && (graphs.len() > 1
                || side * side != graphs[0].patches
                || !side.is_multiple_of(settings.merge_size))
        {
            return Err(Error::graph(format!(
                "graph {:?} has no input cmask, so that it takes one square image; expected it to be the only vision \
                 graph, with a square number of patches",
                host.graph(graphs[0].graph).name
            )));
        }
        if let Some(bucket) = graphs.iter().find(|bucket| bucket.windows.is_some())
            && settings.window.is_none()
        {
            return Err(Error::manifest(format!(
                "manifest params.vision.window is missing: the graph {:?} has an input windows, expected the patches of \
                 a window's side",
                host.graph(bucket.graph).name
            )));
        }
        let max_patches = graphs.iter().map(|bucket| bucket.patches).max().unwrap_or(0);
        let table = graphs.iter().filter_map(|bucket| bucket.rope.map(|[cos, _]| cos.len())).max();
        Ok(Some(Self {
            hidden,
            width,
            merge: settings.merge_size,
            window: settings.window,
            theta: settings.rope_theta,
            order: match settings.rope_between {
                true => AxialOrder::RowsColumnsBetween,
                false => AxialOrder::RowsColumns,
            },
            rows: Vec::with_capacity(max_patches * hidden),
            tables: [(); 2].map(|()| Vec::with_capacity(table.unwrap_or(0))),
            graphs,
        }))
    }

    /// Patches of a side, when there is one graph that takes one square image.
    pub fn fixed(&self) -> Option<usize> {
        self.graphs[0].mask.is_none().then(|| self.graphs[0].patches.isqrt())
    }

    /// Values of a row for a patch.
    pub fn hidden(&self) -> usize {
        self.hidden
    }

    /// Layers that get rows of their own.
    pub fn layers(&self) -> usize {
        self.graphs[0].deepstack.len()
    }

    /// Patches of the largest graph.
    pub fn max_patches(&self) -> usize {
        self.graphs.last().map_or(0, |bucket| bucket.patches)
    }

    /// Runs the smallest graph that takes `grid`. `fill` writes the rows of its patches.
    ///
    /// # Errors
    /// When no graph takes `grid`, or `fill` or the execution fails.
    pub fn run(
        &mut self,
        host: &mut Host,
        grid: Grid,
        fill: impl FnOnce(&Host, &mut [f32]) -> Result<()>,
    ) -> Result<Features> {
        let patches = grid.patches();
        let Some(bucket) = self.graphs.iter().find(|bucket| bucket.patches >= patches) else {
            return Err(Error::prompt(format!(
                "an image of {patches} patches, expected at most {}, which the largest vision graph takes",
                self.max_patches()
            )));
        };
        self.rows.clear();
        self.rows.resize(bucket.patches * self.hidden, 0.0);
        let used = patches * self.hidden;
        fill(host, &mut self.rows[..used])?;
        bucket.x.write(host, &self.rows)?;
        if let Some(inputs) = bucket.rope {
            let width = inputs[0].len() / bucket.patches;
            for table in &mut self.tables {
                table.clear();
                table.resize(inputs[0].len(), 0.0);
            }
            let [cos, sin] = &mut self.tables;
            let used = patches * width;
            let (cos, sin) = (&mut cos[..used], &mut sin[..used]);
            axial_rope(grid, self.merge, self.order, 2 * width, self.theta, cos, sin)?;
            inputs
                .iter()
                .zip(&self.tables)
                .try_for_each(|(input, table)| input.write(host, table))?;
        }
        if let Some(mask) = bucket.mask {
            mask.fill(host, MASK_VALUE);
            mask.write_at(host, 0, &vec![0.0; patches])?;
        }
        if let (Some(input), Some(side)) = (bucket.windows, self.window) {
            // Rows after the last patch are in a window of their own.
            let mut windows = vec![-1.0; bucket.patches];
            window_numbers(grid, self.merge, side, &mut windows[..patches])?;
            input.write(host, &windows)?;
        }
        host.execute(bucket.graph)?;
        let values = patches / (self.merge * self.merge) * self.width;
        let read = |view: &View| {
            let mut out = vec![0.0; values];
            view.to_f32(host, 0, &mut out).map(|()| out)
        };
        let features = Features {
            embeds: read(&bucket.embeds)?,
            deepstack: bucket.deepstack.iter().map(read).collect::<Result<_>>()?,
        };
        let finite =
            |values: &Vec<f32>| values.iter().fold(true, |finite, v| finite & v.is_finite());
        if !(finite(&features.embeds) && features.deepstack.iter().all(finite)) {
            return Err(Error::new(
                ErrorCode::EXECUTE,
                format!(
                    "graph {:?} gave NaN or infinite values for an image of {patches} patches, expected numbers; its \
                     hidden states have overflowed, or the weights are damaged",
                    host.graph(bucket.graph).name
                ),
            ));
        }
        Ok(features)
    }
}

impl Bucket {
    fn open(
        host: &mut Host,
        graph: GraphId,
        patches: usize,
        tokens: usize,
        width: usize,
    ) -> Result<Self> {
        let x = FloatInput::require(host, graph, "x")?;
        let optional = |host: &mut Host, role: &str| {
            let found = host.graph(graph).input(role).is_some();
            found.then(|| FloatInput::require(host, graph, role)).transpose()
        };
        let (cos, sin, mask) =
            (optional(host, "cos")?, optional(host, "sin")?, optional(host, "cmask")?);
        let windows = optional(host, "windows")?;
        let rope = match (cos, sin) {
            (Some(cos), Some(sin))
                if cos.len() == sin.len() && cos.len().is_multiple_of(2 * patches) =>
            {
                Some([cos, sin])
            }
            (None, None) => None,
            _ => {
                return Err(Error::graph(format!(
                    "graph {:?}: expected cos and sin, both with {patches} rows of half a head, or neither",
                    host.graph(graph).name
                )));
            }
        };
        if mask.is_some_and(|mask| mask.len() != patches) || mask.is_some() != rope.is_some() {
            return Err(Error::graph(format!(
                "graph {:?}: expected cmask of {patches} values together with cos and sin, or none of them",
                host.graph(graph).name
            )));
        }
        if windows.is_some_and(|windows| windows.len() != patches || mask.is_none()) {
            return Err(Error::graph(format!(
                "graph {:?}: expected windows of {patches} values together with cmask, or neither",
                host.graph(graph).name
            )));
        }
        let info = host.graph(graph);
        let Some(embeds) = EMBEDS.iter().find_map(|role| info.output(role)) else {
            let have: Vec<_> = info.outputs.iter().map(ToString::to_string).collect();
            return Err(Error::graph(format!(
                "graph {:?}: no output for the rows of an image among {}; looked for {}; plan.params.tensors can say \
                 what it is called",
                info.name,
                have.join(", "),
                EMBEDS.join(", ")
            )));
        };
        let single = (0..).map_while(|layer| info.output(&format!("{DEEPSTACK}_{layer}")));
        let single: Vec<_> = single.collect();
        let joined = info.output(DEEPSTACK);
        let values = tokens * width;
        let embeds = view(host, graph, embeds, values, tokens, width)?;
        let mut deepstack = Vec::new();
        for output in single {
            deepstack.push(view(host, graph, output, values, tokens, width)?);
        }
        if let Some(output) = joined {
            let found = host.tensor(graph, Port::Output(output)).elements();
            let layers = found / values.max(1);
            let all = view(host, graph, output, layers * values, tokens, width)?;
            let layer = |layer: usize| View {
                offset: all.offset + layer * values * all.dtype.size(),
                len: values,
                ..all
            };
            deepstack.extend((0..layers).map(layer));
        }
        Ok(Self { graph, patches, x, rope, mask, windows, embeds, deepstack })
    }
}

/// Binds an output that holds `values` values.
fn view(
    host: &mut Host,
    graph: GraphId,
    output: usize,
    values: usize,
    tokens: usize,
    width: usize,
) -> Result<View> {
    let port = Port::Output(output);
    let tensor = host.tensor(graph, port);
    if values == 0 || tensor.elements() != values {
        let what = format!("expected {tokens} rows of {width}, as wide as the decoder's x");
        return Err(host.misfit(graph, port, what));
    }
    host.view_for(graph, port)
}
