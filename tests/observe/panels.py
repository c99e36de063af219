"""The dashboard's panels, row by row: what each shows, of which metrics, and what to do about it.

`tests.observe.grafana` makes `helm/ec-producer/files/dashboard.json` of them.
"""

from tests.observe.promql import CONSUMERS, PICKED, Panel, gauge, mean, quantiles, rate, seen, share

OVERVIEW = (
    Panel(
        title="Parts",
        unit="none",
        kind="stat",
        is_state=True,
        width=12,
        about="Whether each part that an encode needs works, of the worst producer. Where one is down, health says"
        " NOT_SERVING, and the log of that producer says why.",
        queries=((f"min by (part) (ec_producer_part_up{{{PICKED}}})", "{{part}}"),),
    ),
    Panel(
        title="Producers",
        unit="none",
        kind="stat",
        width=4,
        about="Producers that answer scrapes. Fewer than there are pods: look for pods that restart.",
        queries=((f"count(ec_producer_build_info{{{PICKED}}})", "producers"),),
    ),
    Panel(
        title="Alerts",
        unit="none",
        kind="stat",
        width=4,
        about="Alerts of ec-producer that are firing. docs/operate.md says of each what to do.",
        queries=(('count(ALERTS{alertname=~"EcProducer.+", alertstate="firing"}) or vector(0)', "firing"),),
    ),
    Panel(
        title="Step in hand",
        unit="s",
        kind="stat",
        width=4,
        about="Since when the encoder's step makes no progress. Above 8 s the producer is not healthy, at 60 s it exits"
        " to be restarted: look at the GPU and at what was sent.",
        queries=((f"max(ec_producer_stalled_seconds{{{PICKED}}})", "without progress"),),
    ),
    Panel(
        title="Items",
        unit="cps",
        stacked=True,
        about="Items by outcome. INVALID_ARGUMENT is a bad file and its sender's; RESOURCE_EXHAUSTED is a full queue or"
        " pool: add producers; INTERNAL and UNAVAILABLE are ours: look at the log.",
        queries=((seen("ec_producer_items_total", "code"), "{{code}}"),),
    ),
    Panel(
        title="Requests",
        unit="reqps",
        stacked=True,
        about="Calls by method and outcome. UNAUTHENTICATED is a token or certificate that does not fit;"
        " FAILED_PRECONDITION another model, version or settings at the consumer.",
        queries=((seen("ec_producer_requests_total", "method, code"), "{{method}} {{code}}"),),
    ),
    Panel(
        title="Seconds of an item by stage, p95",
        unit="s",
        about="Where an item's time goes. The wait leads: add producers, or preprocessing processes if they are all"
        " busy. Preprocessing leads: more of them, or smaller media. Encoding leads: see hits and padding.",
        queries=(
            (quantiles("ec_producer_queue_seconds", of=(0.95,))[0][0], "wait"),
            (quantiles("ec_producer_stage_seconds", "stage", of=(0.95,))[0][0], "{{stage}}"),
        ),
    ),
    Panel(
        title="Items without an encode of their own",
        unit="percentunit",
        about="Items that were in the pool or in hand already. Few, though media repeat: make the pool larger, and let"
        " all consumers name the same producers.",
        queries=(
            (
                f"{rate('ec_producer_items_shared_total', 'source')} / scalar({rate('ec_producer_items_total')})",
                "{{source}}",
            ),
        ),
    ),
    Panel(
        title="What runs",
        unit="none",
        kind="table",
        width=16,
        about="Version, model and attention of each producer. Consumers refuse a fingerprint or a wire version that is"
        " not theirs: during an upgrade both are here.",
        queries=(
            (
                f"ec_producer_build_info{{{PICKED}}} * on (namespace, instance) group_left (model, dtype, attention)"
                f" ec_producer_model_info{{{PICKED}}}",
                "{{instance}}",
            ),
        ),
    ),
)
QUEUE = (
    Panel(
        title="Items in hand",
        unit="short",
        about="Admitted and not finished. At --max-queue-items the next one is refused: add producers.",
        queries=((gauge("ec_producer_queue_items"), "{{instance}}"),),
    ),
    Panel(
        title="Bytes in hand",
        unit="bytes",
        about="Media that wait. At --max-queue-bytes the next one is refused.",
        queries=((gauge("ec_producer_queue_bytes"), "{{instance}}"),),
    ),
    Panel(
        title="Wait of an item",
        unit="s",
        about="For a preprocessing process, and for a step. Scale on this.",
        queries=quantiles("ec_producer_queue_seconds", of=(0.5, 0.95, 0.99)),
    ),
    Panel(
        title="Preprocessing of an item",
        unit="s",
        about="Decoding and the model's processor. High: large media; see --max-item-pixels and --max-video-pixels.",
        queries=quantiles("ec_producer_stage_seconds", match='stage="preprocess"'),
    ),
    Panel(
        title="Preprocessing processes",
        unit="short",
        about="Ready ones. Fewer than --preprocess-workers for long: they die faster than they start.",
        queries=((gauge("ec_producer_preprocess_workers"), "{{instance}}"),),
    ),
    Panel(
        title="Preprocessing processes that died",
        unit="cps",
        about="Each by a file that crashed the decoder, took too long or too much memory; its sender was told. Many:"
        " somebody sends hostile files, or the pod's memory is too small for --preprocess-memory-bytes.",
        queries=((rate("ec_producer_preprocess_deaths_total", "instance"), "{{instance}}"),),
    ),
)
ENCODER = (
    Panel(
        title="Graph hits",
        unit="percentunit",
        about="Items that a captured graph encoded, of those that one was meant to. Low: the misses' reason says why,"
        " docs/tune.md what to set.",
        queries=(
            (
                share(
                    rate("ec_producer_graph_hits_total", "instance"),
                    rate("ec_producer_graph_misses_total", "instance", 'reason!~"eager|no_device|unsupported_model"'),
                ),
                "{{instance}}",
            ),
        ),
    ),
    Panel(
        title="Graph misses by reason",
        unit="cps",
        stacked=True,
        about="too_large: raise --graph-rows. too_many_sequences: raise --graph-items. not_exact: --fidelity exact has"
        " its price. capture_failed, unsupported_model: see the log. eager, no_device: as it was started.",
        queries=((seen("ec_producer_graph_misses_total", "reason"), "{{reason}}"),),
    ),
    Panel(
        title="Padding waste by budget",
        unit="percentunit",
        about="Rows that a graph of that size computed for nothing. High at the smallest: items are smaller than it."
        " High elsewhere: steps are too small for their graph, see items in a step.",
        queries=(
            (
                share(
                    rate("ec_producer_graph_rows_total", "budget", 'kind="padding"'),
                    rate("ec_producer_graph_rows_total", "budget", 'kind="real"'),
                ),
                "{{budget}} rows",
            ),
        ),
    ),
    Panel(
        title="Replays by budget",
        unit="cps",
        stacked=True,
        about="Which graphs are used. Only the largest: raise --graph-rows or lower --max-batch-rows.",
        queries=((rate("ec_producer_graph_replays_total", "budget"), "{{budget}} rows"),),
    ),
    Panel(
        title="Items in a step",
        unit="short",
        about="More under load is better. Always 1 under load: media are large, or --max-batch-rows is small.",
        queries=((mean("ec_producer_step_items", "instance"), "{{instance}} mean"),),
    ),
    Panel(
        title="Encoding of a step",
        unit="s",
        about="Until its embeddings are on the host. It grows with rows; at the same rows, look for misses.",
        queries=quantiles("ec_producer_stage_seconds", match='stage="encode"'),
    ),
    Panel(
        title="Wait of a step for a slot",
        unit="s",
        about="For pinned memory that the step before still uses. Near a step's own time: raise --slots.",
        queries=quantiles("ec_producer_slot_wait_seconds"),
    ),
    Panel(
        title="Device memory",
        unit="bytes",
        about="The plan by part, made at start, and what is held now. graphs far from graphs_reserved: others use the"
        " device, too. Rest near 0: lower --graph-rows or --max-batch-rows.",
        queries=((gauge("ec_producer_device_bytes", "part"), "{{part}}"),),
    ),
    Panel(
        title="Embeddings that were not finite",
        unit="cps",
        about="Refused for NaN or infinity; never sent. Any: a broken checkpoint, dtype or device.",
        queries=((rate("ec_producer_non_finite_outputs_total", "instance"), "{{instance}}"),),
    ),
)
POOL = (
    Panel(
        title="Pool",
        unit="percentunit",
        about="Bytes in use, of all. A full pool is as it should be; what is not leased makes room.",
        queries=((f"{gauge('ec_producer_pool_used_bytes')} / {gauge('ec_producer_pool_bytes')}", "{{instance}}"),),
    ),
    Panel(
        title="Embeddings and leases",
        unit="short",
        about="Pinned ones cannot make room. Nearly all pinned: raise --pool-bytes, or find the consumers that do not"
        " release.",
        queries=(
            (gauge("ec_producer_pool_entries", ""), "embeddings"),
            (gauge("ec_producer_pool_pinned_entries", ""), "pinned"),
            (gauge("ec_producer_pool_leases", ""), "leases"),
        ),
    ),
    Panel(
        title="Pool hits",
        unit="percentunit",
        about="Look-ups that found the embedding. Falling while evictions rise: raise --pool-bytes.",
        queries=(
            (
                share(
                    rate("ec_producer_pool_lookups_total", match='result="hit"'),
                    rate("ec_producer_pool_lookups_total", match='result="miss"'),
                ),
                "hits",
            ),
        ),
    ),
    Panel(
        title="Evictions",
        unit="cps",
        width=12,
        about="Embeddings that made room for others.",
        queries=((rate("ec_producer_pool_evictions_total", "instance"), "{{instance}}"),),
    ),
    Panel(
        title="Leases",
        unit="cps",
        width=12,
        about="Those that expire were not released: consumers died, gave up, or are slower than --lease-s.",
        queries=(
            (rate("ec_producer_leases_granted_total"), "granted"),
            (rate("ec_producer_leases_expired_total"), "expired"),
        ),
    ),
)
PULLS = (
    Panel(
        title="Pulls",
        unit="cps",
        width=6,
        stacked=True,
        about="By transport. grpc where nixl or mooncake is meant: the consumer could not use that one.",
        queries=((rate("ec_producer_pulls_total", "transport"), "{{transport}}"),),
    ),
    Panel(
        title="Bytes pulled",
        unit="Bps",
        width=6,
        stacked=True,
        about="Against what the network gives.",
        queries=((rate("ec_producer_pull_bytes_total", "transport"), "{{transport}}"),),
    ),
    Panel(
        title="Seconds of a pull",
        unit="s",
        width=6,
        about="From Acquire to Release, so with the consumer's check.",
        queries=quantiles("ec_producer_pull_seconds", "transport"),
    ),
    Panel(
        title="Pulls that failed",
        unit="cps",
        width=6,
        about="Leases that ended without a Release after Acquire, and Acquires of a transport that is down.",
        queries=((rate("ec_producer_pull_failures_total", "transport"), "{{transport}}"),),
    ),
)
SHIM = (
    Panel(
        title="Pulls by outcome",
        unit="cps",
        stacked=True,
        about="As vLLM's shim counts them, in the chosen namespaces. refused: the producer is gone or has evicted it."
        " timed_out: after pull_timeout_s. The log of vLLM has each reason.",
        queries=((seen("ec_producer_shim_pulls_total", "outcome, transport", CONSUMERS), "{{outcome}} {{transport}}"),),
    ),
    Panel(
        title="Seconds of a pull, seen by the consumer",
        unit="s",
        about="It delays the first token. Far above the producer's own: the shim waits for --max_pulls or its region.",
        queries=quantiles("ec_producer_shim_pull_seconds", "transport", picked=CONSUMERS),
    ),
    Panel(
        title="Bytes pulled by consumers",
        unit="Bps",
        stacked=True,
        about="By transport.",
        queries=((rate("ec_producer_shim_pull_bytes_total", "transport", picked=CONSUMERS), "{{transport}}"),),
    ),
    Panel(
        title="Calls to producers",
        unit="cps",
        stacked=True,
        about="By outcome. UNAVAILABLE is passed on to the next producer.",
        queries=((seen("ec_producer_shim_encodes_total", "code", CONSUMERS), "{{code}}"),),
    ),
    Panel(
        title="Seconds of a call to a producer",
        unit="s",
        about="It delays the first token.",
        queries=quantiles("ec_producer_shim_encode_seconds", picked=CONSUMERS),
    ),
    Panel(
        title="Encoded again",
        unit="cps",
        about="Embeddings that were lost before they were pulled: evicted, expired, or their producer restarted.",
        queries=((rate("ec_producer_shim_reencodes_total", picked=CONSUMERS), "again"),),
    ),
)
RESOURCES = (
    Panel(
        title="CPU of the service",
        unit="short",
        about="Cores, without the preprocessing processes, which are processes of their own. At 1 for long: the event"
        " loop is the bottleneck, add producers.",
        queries=((rate("process_cpu_seconds_total", "instance"), "{{instance}}"),),
    ),
    Panel(
        title="Memory of the service",
        unit="bytes",
        about="Resident, with what is used of the pool, without the preprocessing processes. It stops growing once the"
        " pool is full.",
        queries=((gauge("process_resident_memory_bytes"), "{{instance}}"),),
    ),
    Panel(
        title="Open files",
        unit="percentunit",
        about="Of those that the process may have. Connections are files.",
        queries=((f"{gauge('process_open_fds')} / {gauge('process_max_fds')}", "{{instance}}"),),
    ),
)
ROWS = {
    "Overview": OVERVIEW,
    "Queue and preprocessing": QUEUE,
    "Encoder steps and graphs": ENCODER,
    "Pool and leases": POOL,
    "Transports and pulls": PULLS,
    "Consumers": SHIM,
    "Resources": RESOURCES,
}
