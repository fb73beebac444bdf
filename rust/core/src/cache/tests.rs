#![allow(clippy::unwrap_used)]

use super::*;

const NS: Namespace = Namespace(1);

/// A request as the scheduler keeps it, for whole blocks of two tokens.
struct Request {
    tokens: Vec<u32>,
    table: Vec<BlockId>,
    shadows: Vec<BlockId>,
    cursor: Cursor,
}

impl Request {
    /// Takes what is cached and allocates the rest.
    fn start(cache: &mut KvCache, tokens: &[u32]) -> Self {
        let cursor = matched(cache, NS, tokens);
        let mut table = Vec::new();
        cache.take_match(cursor, &mut table);
        assert!(cache.allocate(tokens.len() as u32 / 2 - cursor.depth(), &mut table));
        Self {
            tokens: tokens.to_vec(),
            table,
            shadows: vec![],
            cursor,
        }
    }

    fn publish(&mut self, cache: &mut KvCache) {
        let at = self.cursor.depth() as usize;
        let (tokens, blocks) = (&self.tokens[at * 2..], &self.table[at..]);
        cache.publish(NS, &mut self.cursor, tokens, blocks, &mut self.shadows);
    }

    fn finish(self, cache: &mut KvCache, others: &[&Request]) {
        cache.release(&self.table);
        cache.release(&self.shadows);
        check(cache, others);
    }

    fn run(cache: &mut KvCache, tokens: &[u32]) -> Vec<BlockId> {
        let mut request = Self::start(cache, tokens);
        request.publish(cache);
        check(cache, &[&request]);
        let table = request.table.clone();
        request.finish(cache, &[]);
        table
    }
}

fn matched(cache: &KvCache, ns: Namespace, tokens: &[u32]) -> Cursor {
    let mut cursor = cache.root(ns);
    cache.extend_match(ns, &mut cursor, tokens, u32::MAX);
    cursor
}

fn depth(cache: &KvCache, tokens: &[u32]) -> u32 {
    matched(cache, NS, tokens).depth()
}

fn check(cache: &KvCache, requests: &[&Request]) {
    let lists = requests
        .iter()
        .flat_map(|request| [&request.table[..], &request.shadows[..]]);
    cache.check_integrity(lists).unwrap();
}

fn cache(num_blocks: u32) -> KvCache {
    KvCache::new(num_blocks, 2, true)
}

#[test]
fn every_block_but_the_null_block_is_allocated() {
    let mut cache = cache(5);
    let mut blocks = Vec::new();
    assert!(cache.allocate(4, &mut blocks));
    assert_eq!(blocks, [1, 2, 3, 4].map(BlockId));
    assert_eq!((cache.num_blocks(), cache.num_free()), (4, 0));
}

#[test]
fn blocks_of_one_request_are_allocated_again_in_their_order() {
    let mut cache = cache(5);
    let private = Request::start(&mut cache, &[1, 2, 3, 4, 5, 6, 7, 8]);
    let table = private.table.clone();
    private.finish(&mut cache, &[]);
    assert_eq!(Request::run(&mut cache, &[1, 2, 3, 4, 5, 6, 7, 8]), table);
    assert_eq!(
        Request::run(&mut cache, &[8, 7, 6, 5, 4, 3, 2, 1]),
        table,
        "after eviction too"
    );
}

#[test]
fn an_allocation_that_does_not_fit_changes_nothing() {
    let mut cache = cache(5);
    Request::run(&mut cache, &[1, 2, 3, 4]);
    let version = cache.version();
    let mut blocks = Vec::new();
    assert!(!cache.allocate(5, &mut blocks));
    assert!(blocks.is_empty());
    assert_eq!(
        (cache.num_free(), cache.num_evictable(), cache.version()),
        (2, 2, version)
    );
}

#[test]
fn a_prefix_is_found_up_to_its_last_whole_block() {
    let mut cache = cache(9);
    Request::run(&mut cache, &[1, 2, 3, 4, 5, 6]);
    assert_eq!(depth(&cache, &[1, 2, 3, 4, 5, 6, 7, 8]), 3);
    assert_eq!(depth(&cache, &[1, 2, 3, 4, 5]), 2);
    assert_eq!(depth(&cache, &[1, 2, 3, 9, 5, 6]), 1);
    assert_eq!(depth(&cache, &[3, 4, 5, 6]), 0);
}

#[test]
fn a_match_never_exceeds_the_most_blocks_it_may_have() {
    let mut cache = cache(9);
    let table = Request::run(&mut cache, &[1, 2, 3, 4, 5, 6]);
    let mut cursor = cache.root(NS);
    for most in [2, 3, 1] {
        cache.extend_match(NS, &mut cursor, &[1, 2, 3, 4, 5, 6], most);
        assert_eq!(cursor.depth(), most);
    }
    let mut taken = Vec::new();
    cache.take_match(cursor, &mut taken);
    assert_eq!(taken, table[..1]);
}

#[test]
fn prompts_that_part_within_an_edge_share_what_comes_before() {
    let mut cache = cache(9);
    let first = Request::run(&mut cache, &[1, 2, 3, 4, 5, 6]);
    let second = Request::run(&mut cache, &[1, 2, 3, 4, 7, 8]);
    assert_eq!(first[..2], second[..2]);
    assert_ne!(first[2], second[2]);
    assert_eq!(cache.num_cached(), 4);
    assert_eq!(
        (
            depth(&cache, &[1, 2, 3, 4, 5, 6]),
            depth(&cache, &[1, 2, 3, 4, 7, 8])
        ),
        (3, 3)
    );
}

#[test]
fn namespaces_share_nothing() {
    let mut cache = cache(9);
    Request::run(&mut cache, &[1, 2, 3, 4]);
    assert_eq!(matched(&cache, Namespace(2), &[1, 2, 3, 4]).depth(), 0);
    let mut cursor = matched(&cache, NS, &[1, 2, 3, 4]);
    cache.extend_match(Namespace(2), &mut cursor, &[1, 2, 3, 4], u32::MAX);
    assert_eq!(
        cursor,
        cache.root(Namespace(2)),
        "a cursor doesn't carry over"
    );
}

#[test]
fn a_taken_match_is_not_evicted() {
    let mut cache = cache(5);
    Request::run(&mut cache, &[1, 2, 3, 4]);
    let cursor = matched(&cache, NS, &[1, 2]);
    assert_eq!(
        (cache.num_evictable(), cache.matched_evictable(cursor)),
        (2, 1)
    );
    let request = Request::start(&mut cache, &[1, 2]);
    assert_eq!(
        (cache.num_evictable(), cache.matched_evictable(cursor)),
        (1, 0)
    );
    let mut blocks = Vec::new();
    assert!(!cache.allocate(4, &mut blocks));
    assert!(cache.allocate(3, &mut blocks));
    assert!(!blocks.contains(&request.table[0]));
    assert_eq!(depth(&cache, &[1, 2, 3, 4]), 1);
}

#[test]
fn the_least_recently_used_prefix_is_evicted_first_and_from_its_end() {
    let mut cache = cache(7);
    Request::run(&mut cache, &[1, 1, 2, 2]);
    Request::run(&mut cache, &[3, 3, 4, 4]);
    Request::run(&mut cache, &[5, 5, 6, 6]);
    Request::run(&mut cache, &[1, 1, 2, 2]);
    let left = |cache: &KvCache| {
        [[1, 1, 2, 2], [3, 3, 4, 4], [5, 5, 6, 6]].map(|tokens| depth(cache, &tokens))
    };
    for expected in [
        [2, 1, 2],
        [2, 0, 2],
        [2, 0, 1],
        [2, 0, 0],
        [1, 0, 0],
        [0, 0, 0],
    ] {
        assert!(cache.allocate(1, &mut Vec::new()));
        assert_eq!(left(&cache), expected);
    }
    assert!(!cache.allocate(1, &mut Vec::new()));
}

#[test]
fn a_branch_that_is_older_than_its_sibling_goes_before_their_common_prefix() {
    let mut cache = cache(5);
    Request::run(&mut cache, &[1, 1, 2, 2]);
    Request::run(&mut cache, &[1, 1, 3, 3]);
    assert!(cache.allocate(2, &mut Vec::new()), "one free, one evicted");
    assert_eq!(
        (depth(&cache, &[1, 1, 2, 2]), depth(&cache, &[1, 1, 3, 3])),
        (1, 2)
    );
}

#[test]
fn a_duplicate_keeps_its_private_block_and_holds_the_trees() {
    let mut cache = cache(9);
    let mut first = Request::start(&mut cache, &[1, 2, 3, 4]);
    let mut second = Request::start(&mut cache, &[1, 2, 5, 6]);
    first.publish(&mut cache);
    second.publish(&mut cache);
    check(&cache, &[&first, &second]);
    assert_eq!(second.shadows, first.table[..1]);
    let (shadow, private) = (first.table[0], second.table[0]);
    assert_eq!((cache.ref_count(shadow), cache.ref_count(private)), (3, 1));
    first.finish(&mut cache, &[&second]);
    assert_eq!(
        cache.num_evictable(),
        1,
        "what lies above the second's published block stays held"
    );
    second.finish(&mut cache, &[]);
    assert_eq!((cache.ref_count(private), cache.num_evictable()), (0, 3));
}

#[test]
fn after_a_clear_nothing_from_before_is_ever_published() {
    let mut cache = cache(9);
    let mut published = Request::start(&mut cache, &[1, 2]);
    published.publish(&mut cache);
    let mut unpublished = Request::start(&mut cache, &[3, 4]);
    cache.clear();
    published.tokens.extend([5, 6]);
    assert!(cache.allocate(1, &mut published.table));
    for request in [&mut published, &mut unpublished] {
        request.publish(&mut cache);
    }
    assert_eq!(cache.num_cached(), 0);
    let mut fresh = Request::start(&mut cache, &[3, 4]);
    fresh.publish(&mut cache);
    unpublished.publish(&mut cache);
    assert_eq!((cache.num_cached(), unpublished.shadows.len()), (1, 0));
    check(&cache, &[&published, &unpublished, &fresh]);
}

#[test]
fn a_clear_frees_what_only_the_tree_holds_and_leaves_requests_their_blocks() {
    let mut cache = cache(9);
    Request::run(&mut cache, &[1, 2, 3, 4]);
    let mut request = Request::start(&mut cache, &[1, 2, 5, 6]);
    request.publish(&mut cache);
    let version = cache.version();
    cache.clear();
    check(&cache, &[&request]);
    assert!(cache.version() > version);
    assert_eq!(
        (cache.num_free(), cache.num_evictable(), cache.num_cached()),
        (6, 0, 0)
    );
    assert_eq!(depth(&cache, &[1, 2]), 0);
    request.finish(&mut cache, &[]);
    assert_eq!(cache.num_free(), 8);
}

#[test]
fn a_cursor_does_not_take_a_block_that_was_cached_again_for_the_one_it_saw() {
    let mut cache = cache(3);
    let tokens = [1, 1, 2, 2];
    let first = Request::run(&mut cache, &tokens);
    let mut waiting = matched(&cache, NS, &tokens);
    // The second block is evicted, then cached again below the same parent with other tokens.
    assert_eq!(Request::run(&mut cache, &[1, 1, 9, 9]), first);
    assert_eq!(cache.matched_evictable(waiting), 0);
    cache.extend_match(NS, &mut waiting, &tokens, u32::MAX);
    assert_eq!(waiting.depth(), 1);
}

#[test]
fn without_prefix_caching_blocks_are_shared_by_handle_only() {
    let mut cache = KvCache::new(5, 2, false);
    let mut request = Request::start(&mut cache, &[1, 2, 3, 4]);
    request.publish(&mut cache);
    assert_eq!((cache.num_cached(), depth(&cache, &[1, 2])), (0, 0));
    cache.retain(&request.table);
    cache.release(&request.table);
    check(&cache, &[&request]);
    request.finish(&mut cache, &[]);
    assert_eq!((cache.num_free(), cache.num_evictable()), (4, 0));
}

#[test]
fn the_version_tells_whether_a_match_can_have_changed() {
    let mut cache = cache(3);
    let mut request = Request::start(&mut cache, &[1, 2]);
    assert_eq!(
        cache.version(),
        0,
        "allocating free blocks changes no match"
    );
    request.publish(&mut cache);
    let published = cache.version();
    request.finish(&mut cache, &[]);
    assert!(published > 0 && cache.version() == published);
    assert!(cache.allocate(2, &mut Vec::new()));
    assert!(cache.version() > published);
}

#[test]
#[should_panic(expected = "block 1 is released but nobody holds it")]
fn a_second_release_is_refused() {
    let mut cache = cache(3);
    let request = Request::start(&mut cache, &[1, 2]);
    cache.release(&request.table);
    cache.release(&request.table);
}

#[test]
#[should_panic(expected = "is stale")]
fn a_stale_match_is_not_taken() {
    let mut cache = cache(3);
    Request::run(&mut cache, &[1, 2]);
    let cursor = matched(&cache, NS, &[1, 2]);
    cache.clear();
    cache.take_match(cursor, &mut Vec::new());
}

#[test]
#[should_panic(expected = "no request holds its path")]
fn nothing_is_published_below_a_path_that_may_be_evicted() {
    let mut cache = cache(4);
    Request::run(&mut cache, &[1, 2]);
    let mut cursor = matched(&cache, NS, &[1, 2]);
    let mut blocks = Vec::new();
    assert!(cache.allocate(1, &mut blocks));
    cache.publish(NS, &mut cursor, &[3, 4], &blocks, &mut Vec::new());
}

#[test]
#[should_panic(expected = "shared before it is published")]
fn a_block_has_one_place_in_the_tree() {
    let mut cache = cache(4);
    let mut request = Request::start(&mut cache, &[1, 2]);
    request.publish(&mut cache);
    let mut root = cache.root(NS);
    cache.publish(NS, &mut root, &[3, 4], &request.table, &mut Vec::new());
}

#[test]
fn integrity_notices_a_wrong_count_counter_or_holder() {
    let healthy = || {
        let mut cache = cache(6);
        Request::run(&mut cache, &[1, 2, 3, 4]);
        let request = Request::start(&mut cache, &[1, 2, 5, 6]);
        (cache, request)
    };
    type Damage = fn(&mut KvCache, &mut Request);
    let damages: [(&str, Damage); 7] = [
        ("num_evictable is 2", |cache, _| cache.num_evictable += 1),
        ("has count 1, 0 references", |_, request| {
            request.table.truncate(1)
        }),
        ("has count 1, 2 references", |_, request| {
            request.shadows.push(request.table[1])
        }),
        ("2 blocks are held by the tree only", |_, request| {
            request.table.remove(0);
        }),
        (
            "1 blocks are held by the tree only, 0 of them",
            |cache, request| {
                // Holds the second block of a path, not the first.
                cache.release(&request.table);
                cache.retain(&[BlockId(2)]);
                request.table = vec![BlockId(2)];
            },
        ),
        ("has count 2, 1 references", |cache, request| {
            cache.pool.retain(request.table[1]);
        }),
        ("idle leaves are", |cache, _| {
            cache.tree.pop_idle_leaf();
        }),
    ];
    let (cache, request) = healthy();
    check(&cache, &[&request]);
    for (expected, damage) in damages {
        let (mut cache, mut request) = healthy();
        damage(&mut cache, &mut request);
        let error = cache.check_integrity([&request.table[..], &request.shadows[..]].into_iter());
        let error = error.expect_err(expected);
        assert!(error.contains(expected), "{error}");
    }
}
