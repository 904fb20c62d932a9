//! Pairs the state tensors of graphs, allocates their buffers and binds them.

use super::cache::{Append, Cache, Rows};
use super::int8;
use qhx_op::{BufferId, Error, GraphId, GraphInfo, Host, Port, Result};

/// A state that a graph replaces.
#[derive(Debug)]
pub(super) struct Swap {
    pub group: usize,
    pub graph: GraphId,
    pub input: usize,
    pub output: usize,
    /// Index into [`Wiring::states`].
    pub state: usize,
    /// True for one swap of each state in a group, which is the one that exchanges its buffers.
    pub exchanges: bool,
}

impl Swap {
    /// Binds the buffers as they stand.
    ///
    /// # Errors
    /// When the host refuses a buffer.
    #[inline]
    pub fn bind(&self, host: &mut Host, state: &Replaced) -> Result<()> {
        host.bind(self.graph, Port::Input(self.input), state.current, 0)?;
        host.bind(self.graph, Port::Output(self.output), state.next, 0)
    }
}

/// The two buffers of a replaced state. `current` is what the next step reads.
#[derive(Debug)]
pub(super) struct Replaced {
    pub role: String,
    pub current: BufferId,
    pub next: BufferId,
}

/// A cache that the graphs of a group read and do not write.
#[derive(Debug)]
pub(super) struct Read {
    pub group: usize,
    /// Index into [`Wiring::caches`].
    pub cache: usize,
    /// Rows of a block as they read it.
    pub rows: usize,
}

/// Caches and states shared by the graphs of all groups.
#[derive(Debug, Default)]
pub(super) struct Wiring {
    pub caches: Vec<Cache>,
    pub appends: Vec<Append>,
    pub reads: Vec<Read>,
    pub states: Vec<Replaced>,
    pub swaps: Vec<Swap>,
}

/// Use of an input `past_X` by a graph.
enum Use {
    Append { output: usize },
    Swap { output: usize },
    Read,
}

fn use_of(info: &GraphInfo, input: usize, role: &str) -> Result<Use> {
    let new = info.output(&format!("new_{role}"));
    let present = info.output(&format!("present_{role}"));
    match (new, present) {
        (Some(output), None) => Ok(Use::Append { output }),
        (None, Some(output)) => Ok(Use::Swap { output }),
        (None, None) => Ok(Use::Read),
        (Some(_), Some(_)) => Err(Error::graph(format!(
            "graph {:?}: input {} has both an output new_{role} and present_{role}",
            info.name, info.inputs[input]
        ))),
    }
}

/// Inputs `past_X` of a graph with their X.
fn pasts(info: &GraphInfo) -> impl Iterator<Item = (usize, &str)> {
    info.inputs
        .iter()
        .enumerate()
        .filter_map(|(input, tensor)| Some((input, tensor.role.strip_prefix("past_")?)))
}

impl Wiring {
    /// Wires `groups`. `window` declares which roles are rings.
    ///
    /// # Errors
    /// When state tensors do not fit each other.
    pub fn new(
        host: &mut Host,
        groups: &[&[GraphId]],
        window: &dyn Fn(&str) -> Option<usize>,
    ) -> Result<Self> {
        let mut wiring = Self::default();
        // Graphs that read and write determine the layout of a cache, so they come first.
        for (group, &graphs) in groups.iter().enumerate() {
            for &graph in graphs {
                wiring.add_pairs(host, group, graph, window)?;
            }
        }
        for (group, &graphs) in groups.iter().enumerate() {
            for &graph in graphs {
                wiring.add_writers(host, group, graph)?;
            }
        }
        for (group, &graphs) in groups.iter().enumerate() {
            for (place, &graph) in graphs.iter().enumerate() {
                wiring.add_reader(host, group, &graphs[..place], graph)?;
            }
        }
        Ok(wiring)
    }

    /// Lays all caches out as they are when nothing is in them.
    pub fn widen(&mut self) {
        for cache in &mut self.caches {
            cache.stride = cache.capacity;
        }
    }

    /// Index of the cache of a role.
    pub fn cache(&self, role: &str) -> Option<usize> {
        self.caches.iter().position(|c| c.role == role)
    }

    fn add_pairs(
        &mut self,
        host: &mut Host,
        group: usize,
        graph: GraphId,
        window: &dyn Fn(&str) -> Option<usize>,
    ) -> Result<()> {
        let info = host.graph(graph).clone();
        for (input, role) in pasts(&info) {
            match use_of(&info, input, role)? {
                Use::Append { output } => {
                    self.add_append(host, group, graph, role, [input, output], window(role))?;
                }
                Use::Swap { output } => {
                    self.add_swap(host, group, graph, role, [input, output])?;
                }
                Use::Read => {}
            }
        }
        Ok(())
    }

    /// Outputs without the input that they continue.
    fn add_writers(&mut self, host: &mut Host, group: usize, graph: GraphId) -> Result<()> {
        let info = host.graph(graph).clone();
        for (output, tensor) in info.outputs.iter().enumerate() {
            let new = tensor.role.strip_prefix("new_");
            let Some(role) = new.or(tensor.role.strip_prefix("present_")) else { continue };
            if info.input(&format!("past_{role}")).is_some() {
                continue;
            }
            match self.cache(role) {
                Some(cache) if new.is_some() => {
                    self.add_rows(host, group, graph, output, cache)?;
                }
                _ => {
                    return Err(Error::graph(format!(
                        "graph {:?}: output {tensor} has no input past_{role} to carry it back to",
                        info.name
                    )));
                }
            }
        }
        Ok(())
    }

    /// Inputs that read what another graph, the donor, writes: its cache, and its rows of this step.
    fn add_reader(
        &mut self,
        host: &mut Host,
        group: usize,
        before: &[GraphId],
        graph: GraphId,
    ) -> Result<()> {
        let info = host.graph(graph).clone();
        for (input, role) in pasts(&info) {
            let Use::Read = use_of(&info, input, role)? else { continue };
            let past = &info.inputs[input];
            let Some(index) = self.cache(role) else {
                return Err(Error::graph(format!(
                    "graph {:?}: input {past} has neither an output new_{role} nor \
                     present_{role}, and no other graph takes past_{role} and gives new_{role}, so \
                     its next value is unknown",
                    info.name
                )));
            };
            let cache = &self.caches[index];
            let axis = cache.axis;
            let of_group = |append: &&Append| (append.cache, append.group) == (index, group);
            let written = self.appends.iter().find(of_group);
            let rows = past.shape.get(axis).copied().unwrap_or(0);
            let capacity = match written {
                Some(append) => append.reads.unwrap_or(cache.capacity),
                // Graphs of a smaller context.
                None if cache.window.is_none() && (1..cache.capacity).contains(&rows) => rows,
                None => cache.capacity,
            };
            let outer = past.shape.iter().take(axis).product::<usize>();
            let inner = past.shape.iter().skip(axis + 1).product::<usize>();
            let found = (past.dtype, outer, rows, inner * past.dtype.size());
            if found != (cache.dtype, cache.outer, capacity, cache.row) {
                return Err(unlike(&info, input, cache));
            }
            host.bind(graph, Port::Input(input), cache.buffer, 0)?;
            if written.is_none() {
                self.reads.push(Read { group, cache: index, rows });
            }
            int8::bind_scales(&mut self.caches, host, graph, past, index)?;
            let Some(fresh) = info.input(&format!("row_{role}")) else { continue };
            let donor = self
                .appends
                .iter()
                .find(|a| a.cache == index && a.group == group && before.contains(&a.graph));
            let Some(donor) = donor else {
                return Err(Error::graph(format!(
                    "graph {:?}: input {} takes the rows that a graph before it in the same step \
                     gives as new_{role}, but none does; name the graphs of the step in their order",
                    info.name, info.inputs[fresh]
                )));
            };
            let rows = host.tensor(donor.graph, Port::Output(donor.output));
            let tensor = &info.inputs[fresh];
            if (tensor.dtype, tensor.elements()) != (rows.dtype, rows.elements()) {
                return Err(Error::graph(format!(
                    "graph {:?}: input {tensor} must be like output {rows} of graph {:?}, whose \
                     rows it takes",
                    info.name,
                    host.graph(donor.graph).name
                )));
            }
            host.bind(graph, Port::Input(fresh), donor.new, 0)?;
        }
        Ok(())
    }

    fn add_append(
        &mut self,
        host: &mut Host,
        group: usize,
        graph: GraphId,
        role: &str,
        [input, output]: [usize; 2],
        window: Option<usize>,
    ) -> Result<()> {
        let past = host.tensor(graph, Port::Input(input)).clone();
        let new = host.tensor(graph, Port::Output(output)).clone();
        let mismatch = |why: &str| {
            Error::graph(format!(
                "graph {:?}: {past} and {new} do not fit as a cache and its new rows: {why}",
                host.graph(graph).name
            ))
        };
        let rows_of = int8::rows_of(host.graph(graph), role, [&past, &new], self.caches.len() + 1)?;
        if past.shape.len() != new.shape.len() {
            return Err(mismatch("the ranks differ"));
        }
        let known = self.cache(role);
        let mut differing = (0..past.shape.len()).filter(|&a| past.shape[a] != new.shape[a]);
        let axis = match (differing.next(), differing.next(), known) {
            (Some(axis), None, _) => axis,
            // As many new rows as the cache has: another graph has determined which axis it is.
            (None, None, Some(index)) => self.caches[index].axis,
            _ => return Err(mismatch("exactly one dimension must differ, the position")),
        };
        let (capacity, rows) = (past.shape[axis], new.shape[axis]);
        if rows > capacity {
            return Err(mismatch(&match window {
                Some(_) => format!(
                    "a step of {rows} rows does not fit a ring of {capacity} slots; make the ring \
                     larger or the step smaller"
                ),
                None => "there are more new rows than the cache holds".to_owned(),
            }));
        }
        if let Some(window) = window
            && (window == 0 || window - 1 > capacity)
        {
            return Err(mismatch(&format!(
                "a ring of {capacity} slots does not hold what a window of {window} positions sees"
            )));
        }
        let inner: usize = past.shape[axis + 1..].iter().product();
        let outer: usize = past.shape[..axis].iter().product();
        let row = inner * past.dtype.size();

        let cache = match known {
            Some(index) => {
                let have = &self.caches[index];
                // One block of rows after the other: fewer of each for a smaller context.
                let fits =
                    capacity == have.capacity || window.is_none() && capacity < have.capacity;
                if !fits
                    || (have.dtype, have.axis, have.outer, have.row)
                        != (past.dtype, axis, outer, row)
                    || (have.rows == Rows::Plain) != (rows_of == Rows::Plain)
                {
                    return Err(mismatch("another graph has this cache in another layout"));
                }
                host.bind(graph, Port::Input(input), have.buffer, 0)?;
                index
            }
            None => {
                let buffer = host.allocate_for(graph, Port::Input(input))?;
                let role = role.to_owned();
                let dtype = past.dtype;
                let stride = capacity;
                let rows = rows_of;
                let layout =
                    Cache { role, buffer, dtype, axis, outer, capacity, stride, row, window, rows };
                self.caches.push(layout);
                self.caches.len() - 1
            }
        };
        int8::bind_scales(&mut self.caches, host, graph, &past, cache)?;
        let (dtype, row) = (new.dtype, inner * new.dtype.size());
        let new = host.allocate_for(graph, Port::Output(output))?;
        let reads = Some(capacity);
        self.appends.push(Append { group, graph, output, new, cache, rows, reads, dtype, row });
        Ok(())
    }

    /// An output whose rows go into a cache that the graph itself does not read.
    fn add_rows(
        &mut self,
        host: &mut Host,
        group: usize,
        graph: GraphId,
        output: usize,
        index: usize,
    ) -> Result<()> {
        let cache = &self.caches[index];
        let axis = cache.axis;
        let new = host.tensor(graph, Port::Output(output));
        let rows = new.shape.get(axis).copied().unwrap_or(0);
        let outer: usize = new.shape.iter().take(axis).product();
        let inner: usize = new.shape.iter().skip(axis + 1).product();
        let (dtype, row) = (new.dtype, inner * new.dtype.size());
        // Of int8 rows a byte is a value.
        let values = match cache.rows {
            Rows::Int8 { .. } => int8::is_float(dtype) && inner == cache.row,
            _ if int8::become_f16(cache.dtype, dtype) => row == 2 * cache.row,
            _ => (dtype, row) == (cache.dtype, cache.row),
        };
        let fits = values && outer == cache.outer && (1..=cache.capacity).contains(&rows);
        if !fits {
            return Err(Error::graph(format!(
                "graph {:?}: {new} does not fit the cache past_{} of {} blocks of {} rows of {} \
                 bytes, {}",
                host.graph(graph).name,
                cache.role,
                cache.outer,
                cache.capacity,
                cache.row,
                cache.dtype
            )));
        }
        let new = host.allocate_for(graph, Port::Output(output))?;
        let (cache, reads) = (index, None);
        self.appends.push(Append { group, graph, output, new, cache, rows, reads, dtype, row });
        Ok(())
    }

    fn add_swap(
        &mut self,
        host: &mut Host,
        group: usize,
        graph: GraphId,
        role: &str,
        [input, output]: [usize; 2],
    ) -> Result<()> {
        let past = host.tensor(graph, Port::Input(input)).clone();
        let present = host.tensor(graph, Port::Output(output)).clone();
        if past.dtype != present.dtype || past.shape != present.shape {
            return Err(Error::graph(format!(
                "graph {:?}: {past} and {present} must have the same shape and dtype to replace \
                 each other",
                host.graph(graph).name
            )));
        }
        let known = self.states.iter().position(|s| s.role == role);
        let state = match known {
            Some(index) => index,
            None => {
                let current = host.allocate(past.byte_len())?;
                let next = host.allocate(past.byte_len())?;
                self.states.push(Replaced { role: role.to_owned(), current, next });
                self.states.len() - 1
            }
        };
        let exchanges = !self.swaps.iter().any(|s| (s.group, s.state) == (group, state));
        let swap = Swap { group, graph, input, output, state, exchanges };
        swap.bind(host, &self.states[state])?;
        self.swaps.push(swap);
        Ok(())
    }
}

/// An input has not the layout of the cache that it reads.
fn unlike(info: &GraphInfo, input: usize, cache: &Cache) -> Error {
    Error::graph(format!(
        "graph {:?}: input {} does not fit the cache past_{} that another graph writes: {} blocks of \
         {} rows of {} bytes, {}",
        info.name,
        info.inputs[input],
        cache.role,
        cache.outer,
        cache.capacity,
        cache.row,
        cache.dtype
    ))
}
