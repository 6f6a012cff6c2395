"""Shapes that people use scans with, by use; few of them were tuned for. ``bench --uses`` times them."""

#: Cases as ``--case`` takes them.
USES = {
    "packed sequences, channels contiguous": """
        channel_last:1,256,65536:bfloat16:sequences=32
        channel_last:1,1024,32768:bfloat16:sequences=16
        channel_last:1,2048,131072:bfloat16:sequences=200
        channel_last:1,512,65536:float32:sequences=64
        channel_last:1,768,16384:bfloat16:sequences=8
    """,
    "packed sequences, time contiguous": """
        time_last:1,1024,65536:bfloat16:sequences=32
        time_last:1,512,32768:float32:sequences=20
    """,
    "one gate for all steps": """
        channel_last:16,8,16000:float32:gates=channel
        channel_last:1,8,1048576:float32:gates=channel
        channel_last:32,64,8192:float32:gates=channel
        channel_last:8,256,4096:float32:gates=channel
        time_last:64,1,480000:float32:gates=channel
        time_last:2,1,4194304:float32:gates=channel
        channel_last:8,64,16384:complex64:gates=channel
        time_last:256,4,2048:float32:gates=channel
        channel_last:64,17,2048:float32:gates=channel
    """,
    "time series of few channels": """
        channel_last:256,7,512:float32
        channel_last:256,21,512:float32
        channel_last:1024,21,168:bfloat16
        channel_last:512,64,300:bfloat16
        channel_last:2048,32,96:float32
        channel_last:128,12,720:float32
        channel_last:512,25,336:float32
    """,
    "odd numbers of channels in 16 bits": """
        channel_last:8,301,4099:bfloat16
        channel_last:8,1001,4099:bfloat16
        channel_last:16,501,1024:float16
        channel_last:4,999,8192:bfloat16
    """,
    "time-major batches of environments": """
        channel_last:1,256,4096:float32
        channel_last:1,512,8192:float32
        channel_last:1,1024,2048:bfloat16
        channel_last:1,4096,2048:float32
        channel_last:1,128,16384:float32
    """,
    "images and odd lengths, time contiguous": """
        time_last:16,768,197:bfloat16
        time_last:64,384,577:float32
        time_last:32,512,1025:bfloat16
        time_last:8,2048,333:bfloat16
    """,
    "language models": """
        channel_last:8,1536,2048:bfloat16
        channel_last:4,2048,4096:bfloat16
        time_last:8,1536,4096:bfloat16
        channel_last:2,2560,16384:bfloat16
        time_last:4,1024,8192:float32
    """,
    "long sequences of few channels": """
        channel_last:1,64,65536:bfloat16
        channel_last:1,21,262144:float32
        time_last:4,4,1048576:float32
    """,
}
