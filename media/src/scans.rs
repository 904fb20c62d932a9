//! Check for complete scans of a JPEG file: its decoder reads zeros behind the end marker.

/// Bits of the longest Huffman code.
const MAX_CODE_BITS: usize = 16;
/// Scans of a file that are looked into; the decoder refuses more.
const SCANS: usize = 100;
/// Components of a frame that the decoder takes.
const COMPONENTS: usize = 4;
/// Coefficients of a block.
const COEFFICIENTS: u8 = 64;

/// Number of units (blocks or MCUs) that are there of the first scan that ends early, and number that it should have.
///
/// `None` where nothing is missing, and where the file is of a kind that is not looked into or broken in another way:
/// the decoder reports these.
pub(crate) fn cut_off(bytes: &[u8]) -> Option<(u64, u64)> {
    Scans { bytes, ..Scans::default() }.walk()
}

/// For the next 16 bits: the length of the Huffman code that they begin with, times 256, plus its symbol; 0 for no
/// code.
type Table = Vec<u16>;

#[derive(Default)]
struct Component {
    id: u8,
    /// Blocks of an MCU, horizontally and vertically.
    h: u32,
    v: u32,
    /// Blocks in a row and rows of blocks, padded to whole MCUs.
    stride: usize,
    /// Blocks in a row and rows of blocks of a scan of this component alone.
    columns: u32,
    rows: u32,
    /// Progressive: which coefficients of each block are not zero.
    nonzero: Vec<u64>,
}

#[derive(Default)]
struct Scans<'a> {
    bytes: &'a [u8],
    at: usize,
    tables: [[Table; 4]; 2],
    components: Vec<Component>,
    progressive: bool,
    /// MCUs in a row, and rows of them.
    mcus: (u32, u32),
    /// MCUs between restart markers; 0 for none.
    restart: u64,
}

/// Fields of a scan's header beside its components.
struct Spectral {
    start: u8,
    end: u8,
    refines: bool,
}

impl<'a> Scans<'a> {
    fn walk(mut self) -> Option<(u64, u64)> {
        self.at = 2;
        let mut scans = 0;
        while scans < SCANS {
            let marker = self.marker()?;
            match marker {
                0xd9 => return None,
                0x01 | 0xd0..=0xd8 => continue,
                _ => {}
            }
            let (length, rest) = self.bytes.get(self.at..)?.split_first_chunk::<2>()?;
            let length = usize::from(u16::from_be_bytes(*length));
            let body = rest.get(..length.checked_sub(2)?)?;
            self.at += length;
            match marker {
                0xc4 => self.huffman(body)?,
                0xc0..=0xc2 if self.components.is_empty() => self.frame(marker, body)?,
                // A second frame; lossless, hierarchical or arithmetic coding.
                0xc0..=0xc3 | 0xc5..=0xc7 | 0xc9..=0xcb | 0xcd..=0xcf => return None,
                0xdd => self.restart = u64::from(u16::from_be_bytes(*body.first_chunk()?)),
                0xda => {
                    scans += 1;
                    if let Some(missing) = self.scan(body)? {
                        return Some(missing);
                    }
                }
                _ => {}
            }
        }
        None
    }

    /// The next marker, and goes behind it.
    fn marker(&mut self) -> Option<u8> {
        let rest = self.bytes.get(self.at..)?;
        let start = rest.windows(2).position(|pair| matches!(pair, [0xff, 1..=0xfe]))?;
        self.at += start + 2;
        rest.get(start + 1).copied()
    }

    fn frame(&mut self, marker: u8, body: &[u8]) -> Option<()> {
        let [_, y0, y1, x0, x1, count, components @ ..] = body else { return None };
        let [height, width] = [[y0, y1], [x0, x1]].map(|[a, b]| u32::from(*a) << 8 | u32::from(*b));
        self.progressive = marker == 0xc2;
        let sizes: Vec<_> = components
            .chunks_exact(3)
            .take(usize::from(*count))
            .filter_map(|c| {
                Some((*c.first()?, u32::from(*c.get(1)? >> 4), u32::from(*c.get(1)? & 15)))
            })
            .collect();
        let most_h = sizes.iter().map(|size| size.1).max()?;
        let most_v = sizes.iter().map(|size| size.2).max()?;
        if sizes.len() > COMPONENTS
            || sizes.iter().any(|(_, h, v)| !(1..=4).contains(h) || !(1..=4).contains(v))
        {
            return None;
        }
        self.mcus = (width.div_ceil(8 * most_h), height.div_ceil(8 * most_v));
        let (across, down) = self.mcus;
        let progressive = self.progressive;
        self.components = sizes
            .into_iter()
            .map(|(id, h, v)| {
                let stride = (across * h) as usize;
                let blocks = if progressive { stride * (down * v) as usize } else { 0 };
                Component {
                    id,
                    h,
                    v,
                    stride,
                    columns: (width * h).div_ceil(8 * most_h),
                    rows: (height * v).div_ceil(8 * most_v),
                    nonzero: vec![0; blocks],
                }
            })
            .collect();
        Some(())
    }

    fn huffman(&mut self, mut body: &[u8]) -> Option<()> {
        while let Some((&target, rest)) = body.split_first() {
            let (counts, rest) = rest.split_first_chunk::<MAX_CODE_BITS>()?;
            let all: usize = counts.iter().copied().map(usize::from).sum();
            let mut symbols = rest.get(..all)?.iter();
            body = rest.get(all..)?;
            let mut table = Vec::with_capacity(1 << MAX_CODE_BITS);
            for (length, &count) in (1u16..).zip(counts) {
                for symbol in symbols.by_ref().take(usize::from(count)) {
                    let entry = length << 8 | u16::from(*symbol);
                    let end = table.len() + (1 << (MAX_CODE_BITS as u16 - length));
                    if end > 1 << MAX_CODE_BITS {
                        return None;
                    }
                    table.resize(end, entry);
                }
            }
            table.resize(1 << MAX_CODE_BITS, 0);
            let class = self.tables.get_mut(usize::from(target >> 4))?;
            *class.get_mut(usize::from(target & 15))? = table;
        }
        Some(())
    }

    /// Reads a scan to its end. The outer `None` where it cannot be judged.
    #[allow(clippy::option_option, reason = "not judged, nothing missing, missing")]
    fn scan(&mut self, body: &[u8]) -> Option<Option<(u64, u64)>> {
        let (&count, rest) = body.split_first()?;
        if usize::from(count) > COMPONENTS {
            return None;
        }
        let (named, rest) = rest.split_at_checked(usize::from(count) * 2)?;
        let [start, end, successive, ..] = *rest else { return None };
        let spectral = if self.progressive {
            Spectral { start, end: end.min(COEFFICIENTS - 1), refines: successive >> 4 != 0 }
        } else {
            Spectral { start: 0, end: COEFFICIENTS - 1, refines: false }
        };
        let mut members = Vec::new();
        for pair in named.chunks_exact(2) {
            let [id, tables] = *pair else { return None };
            let index = self.components.iter().position(|component| component.id == id)?;
            members.push((index, usize::from(tables >> 4), usize::from(tables & 15)));
        }
        let alone = members.len() == 1;
        let (across, down) = match (alone, members.first()) {
            (true, Some(&(index, ..))) => {
                self.components.get(index).map(|component| (component.columns, component.rows))?
            }
            _ => self.mcus,
        };
        let total = u64::from(across) * u64::from(down);
        let mut bits = Bits { bytes: self.bytes.get(self.at..)?, ..Bits::default() };
        let mut skipped = 0;
        let mut none = Vec::new();
        for unit in 0..total {
            if self.restart != 0 && unit > 0 && unit % self.restart == 0 {
                bits.restart();
                skipped = 0;
            }
            let (x, y) = ((unit % u64::from(across)) as usize, (unit / u64::from(across)) as usize);
            for &(index, dc, ac) in &members {
                let component = self.components.get_mut(index)?;
                let (h, v) = if alone { (1, 1) } else { (component.h, component.v) };
                let (h, v) = (h as usize, v as usize);
                let stride = component.stride;
                let nonzero = if self.progressive { &mut component.nonzero } else { &mut none };
                for (row, column) in (0..v).flat_map(|row| (0..h).map(move |column| (row, column)))
                {
                    let place = (y * v + row) * stride + x * h + column;
                    let mut ignored = 0;
                    let history = nonzero.get_mut(place).unwrap_or(&mut ignored);
                    let [dc, ac] =
                        [(0, dc), (1, ac)].map(|(class, at)| self.tables.get(class)?.get(at));
                    block(&mut bits, dc?, ac?, &spectral, self.progressive, history, &mut skipped)?;
                }
            }
            if bits.missing() {
                return Some(Some((unit, total)));
            }
        }
        self.at += bits.at;
        Some(None)
    }
}

/// Reads a block. `None` for what is no code.
fn block(
    bits: &mut Bits<'_>,
    dc: &Table,
    ac: &Table,
    spectral: &Spectral,
    progressive: bool,
    nonzero: &mut u64,
    skipped: &mut u32,
) -> Option<()> {
    let mut k = spectral.start;
    if k == 0 {
        if spectral.refines {
            bits.take(1);
        } else {
            let size = bits.symbol(dc)?;
            bits.take(size);
        }
        k = 1;
        if progressive {
            return Some(());
        }
    }
    if *skipped > 0 {
        *skipped -= 1;
        if spectral.refines {
            bits.refine(*nonzero, k, spectral.end);
        }
        return Some(());
    }
    while k <= spectral.end {
        let symbol = bits.symbol(ac)?;
        let (mut run, size) = (symbol >> 4, symbol & 15);
        if size == 0 && run < 15 {
            if progressive {
                *skipped = (1 << run) - 1 + bits.take(run);
            }
            if spectral.refines {
                bits.refine(*nonzero, k, spectral.end);
            }
            return Some(());
        }
        bits.take(size);
        if spectral.refines {
            while k <= spectral.end {
                if *nonzero >> k & 1 == 1 {
                    bits.take(1);
                } else if run == 0 {
                    break;
                } else {
                    run -= 1;
                }
                k += 1;
            }
        } else {
            k += run;
        }
        if size > 0 && k < COEFFICIENTS {
            *nonzero |= 1 << k;
        }
        k += 1;
    }
    Some(())
}

/// The bits of a scan, up to its next marker.
#[derive(Default)]
struct Bits<'a> {
    bytes: &'a [u8],
    at: usize,
    buffer: u64,
    /// Bits in the buffer.
    held: u8,
    /// Bits that were taken behind the end.
    beyond: u64,
}

impl Bits<'_> {
    fn fill(&mut self) {
        while self.held <= 48 {
            let rest = self.bytes.get(self.at..).unwrap_or_default();
            let (byte, length) = match rest {
                [0xff, 0, ..] => (0xff, 2),
                // Padding before a marker, or the marker.
                [0xff, ..] | [] => return,
                [byte, ..] => (*byte, 1),
            };
            self.buffer = self.buffer << 8 | u64::from(byte);
            self.held += 8;
            self.at += length;
        }
    }

    /// The next 16 bits, with zeros behind the end.
    fn peek(&mut self) -> usize {
        if self.held < 16 {
            self.fill();
        }
        let bits = match self.held {
            held @ 16.. => self.buffer >> (held - 16),
            held => self.buffer << (16 - held),
        };
        (bits & 0xffff) as usize
    }

    fn take(&mut self, count: u8) -> u32 {
        let bits = self.peek() as u32;
        let held = self.held.min(count);
        self.beyond += u64::from(count - held);
        self.held -= held;
        if count == 0 { 0 } else { bits >> (16 - count.min(16)) }
    }

    fn symbol(&mut self, table: &Table) -> Option<u8> {
        let entry = *table.get(self.peek())?;
        let [length, symbol] = entry.to_be_bytes();
        // Behind the end there are no codes to be wrong.
        if length == 0 && !self.missing() && self.held >= 16 {
            return None;
        }
        self.take(length.max(1));
        Some(symbol)
    }

    /// One bit for each coefficient that is known not to be zero.
    fn refine(&mut self, nonzero: u64, from: u8, to: u8) {
        (from..=to).filter(|k| nonzero >> k & 1 == 1).for_each(|_| {
            self.take(1);
        });
    }

    fn missing(&self) -> bool {
        self.beyond > 0
    }

    /// Goes behind the restart marker, where one is next.
    fn restart(&mut self) {
        (self.held, self.buffer) = (0, 0);
        let rest = self.bytes.get(self.at..).unwrap_or_default();
        let marker = rest.windows(2).position(|pair| matches!(pair, [0xff, 1..=0xfe]));
        if let Some(start) = marker
            && matches!(rest.get(start + 1), Some(0xd0..=0xd7))
        {
            self.at += start + 2;
        }
    }
}
