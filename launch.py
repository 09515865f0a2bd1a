from cp_engine.job.cli import main

if __name__ == "__main__":
    main()
